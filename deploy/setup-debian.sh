#!/bin/sh
# Adds the Debian or Ubuntu packages that the project needs and the machine lacks; does nothing when none is missing.
# No service is running afterwards that was not running before. PYTHON names the interpreter to be used; arguments are
# more packages that are wanted.
set -eu

fail() {
    echo "error: $*" >&2
    exit 1
}

have() {
    command -v "$1" > /dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ]
}

[ -n "${PYTHON:-}" ] || fail "no Python 3.11 or newer was found: install one, or name it with make PYTHON=/path/to/python3"

root=false
[ "$(id -u)" -ne 0 ] || root=true

missing=
if ! "$PYTHON" -c 'import ensurepip, venv' 2> /dev/null; then
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)" = "$version" ]; then
        missing="$missing python3-venv"
    else
        missing="$missing python$version-venv"
    fi
fi
{ have ssh && have ssh-keygen; } || missing="$missing openssh-client"
have sshd || missing="$missing openssh-server"
# only root's lab has networks of its own
! $root || have ip || missing="$missing iproute2"
for package; do
    dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q '^install ok' || missing="$missing $package"
done
missing=${missing# }

[ -n "$missing" ] || exit 0
have apt-get || fail "missing: $missing (Debian's names); install them, this machine has no apt-get"
$root || fail "missing: $missing; install with: sudo apt-get install --no-install-recommends $missing"

policy=/usr/sbin/policy-rc.d
saved=$policy.before-dflash
mark='# temporary, written by deploy/setup-debian.sh of dflash-pipeline'

restore_policy() {
    if grep -qsxF "$mark" "$policy"; then
        rm -f "$policy"
    fi
    if [ -e "$saved" ] || [ -L "$saved" ]; then
        mv -f "$saved" "$policy"
    fi
}

# what an interrupted run left
restore_policy
trap restore_policy EXIT
trap 'exit 130' INT TERM HUP
if [ -e "$policy" ] || [ -L "$policy" ]; then
    mv "$policy" "$saved"
fi
printf '#!/bin/sh\n%s\nexit 101\n' "$mark" > "$policy"
chmod 0755 "$policy"

case " $missing " in
    *" openssh-server "*)
        if [ "$(cat /proc/1/comm)" = systemd ]; then
            # otherwise the next boot would start it
            systemctl mask ssh.service ssh.socket
            echo "ssh.service and ssh.socket stay masked; to use them: systemctl unmask ssh.service ssh.socket"
        fi
        ;;
esac

export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
apt-get update || fail "apt-get update failed; by hand: apt-get install --no-install-recommends $missing"
# shellcheck disable=SC2086 - one word a package
apt-get install -y --no-install-recommends $missing ||
    fail "apt-get could not install $missing; its last lines above say why"
