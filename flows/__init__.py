"""Prefect flows and the operator's command line: order, schedule, trigger; no logic of their own."""
