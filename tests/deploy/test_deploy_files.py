"""The files for running the server by other means, each checked by what reads it."""

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from flows.deployments import FLOWS, NAME, Nightly
from flows.pruning import Retention
from flows.pruning import settings as pruned
from tasks import process

DEPLOY = Path(__file__).parents[2] / "deploy"


class Strict(BaseModel):
    """As in the compose specification: what it does not know is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Healthcheck(Strict):
    test: list[str]
    interval: str = Field(pattern=r"^\d+(ms|s|m|h)$")
    timeout: str = Field(pattern=r"^\d+(ms|s|m|h)$")
    retries: int


class Dependency(Strict):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Service(Strict):
    image: str = Field(pattern=r"^[a-z0-9/-]+:[\w.-]+$")
    restart: Literal["no", "always", "on-failure", "unless-stopped"]
    command: list[str] = []
    depends_on: dict[str, Dependency] = {}
    environment: dict[str, str]
    volumes: list[str] = []
    ports: list[str] = []
    healthcheck: Healthcheck


class Compose(Strict):
    """What of the compose specification is used here."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    services: dict[str, Service]
    volumes: dict[str, None]


@pytest.fixture
def compose() -> Compose:
    return Compose.model_validate(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def verify_units(*units: Path, home: Path) -> str:
    """What ``systemd-analyze verify`` has to say of units of a user whose home is ``home``; empty when all is well."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze is installed")
    runtime = home / "runtime"
    runtime.mkdir(exist_ok=True)
    env = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(runtime)}
    done = process.run(["systemd-analyze", "--user", "verify", *units], env=env, check=False)
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of an operator with a checkout."""
    program = tmp_path / "dflash" / ".venv" / "bin" / "dflash-ops"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def test_systemd_finds_nothing_wrong_with_the_units(home: Path) -> None:
    units = sorted((DEPLOY / "systemd").iterdir())
    assert {unit.suffix for unit in units} == {".service", ".timer"}
    assert verify_units(*units, home=home) == ""


def test_systemd_would_have_found_a_misspelt_key(home: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "dflash-wrong.service"
    wrong.write_text((DEPLOY / "systemd" / "dflash-serve.service").read_text().replace("KillMode", "KilMode"))
    assert "Unknown key 'KilMode'" in verify_units(wrong, home=home)


def test_the_command_of_a_unit_is_one_that_there_is() -> None:
    from typer.testing import CliRunner

    from flows.cli import app

    for unit in (DEPLOY / "systemd").glob("*.service"):
        (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        _, *words = line.partition("=")[2].split()
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, unit.name


def test_the_compose_file_is_one_and_its_services_fit_together(compose: Compose) -> None:
    assert set(compose.services) == {"postgres", "prefect"}
    for service in compose.services.values():
        assert set(service.depends_on) <= set(compose.services)
        assert {volume.partition(":")[0] for volume in service.volumes} <= set(compose.volumes)
    postgres, prefect = compose.services["postgres"].environment, compose.services["prefect"].environment
    assert prefect["PREFECT_SERVER_DATABASE_HOST"] in compose.services
    for here, there in (("NAME", "DB"), ("USER", "USER"), ("PASSWORD", "PASSWORD")):
        assert prefect[f"PREFECT_SERVER_DATABASE_{here}"] == postgres[f"POSTGRES_{there}"]
    # reached from this machine only, and no password stands in the file
    assert [port.partition(":")[0] for port in compose.services["prefect"].ports] == ["127.0.0.1"]
    assert postgres["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")


def test_the_compose_file_prunes_as_serve_does_and_prefect_knows_its_settings(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = compose.services["prefect"].environment
    assert pruned(Retention()).items() <= environment.items()
    from prefect.settings import Settings

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    assert server.analytics_enabled is False
    assert (server.database.driver, server.database.host, server.database.port) == (
        "postgresql+asyncpg",
        "postgres",
        5432,
    )
    url = server.database.connection_url
    assert url is not None
    assert url.get_secret_value().endswith("@postgres:5432/prefect")
    assert server.database.timeout == 60
    assert server.ui.api_url == "http://127.0.0.1:4200/api"


def test_the_compose_file_keeps_to_the_specification() -> None:
    checker = pytest.importorskip("check_jsonschema", reason="check-jsonschema brings the specification's schema")
    from check_jsonschema.cli import main

    assert checker
    with pytest.raises(SystemExit) as ended:
        main(["--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")])
    assert ended.value.code == 0


def test_prefect_yaml_names_the_deployments_of_serve() -> None:
    described: dict[str, Any] = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())
    deployments = described["deployments"]
    assert [one["entrypoint"] for one in deployments] == [f"flows.{name}.{name}" for name in FLOWS]
    assert {one["name"] for one in deployments} == {NAME}
    assert {one["work_pool"]["name"] for one in deployments} == {"dflash"}
    scheduled = {one["entrypoint"]: one["schedules"] for one in deployments if "schedules" in one}
    nightly = Nightly()
    assert scheduled == {
        "flows.nightly_comparison.nightly_comparison": [{"cron": nightly.cron, "timezone": nightly.timezone}]
    }
