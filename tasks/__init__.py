"""What is done to hosts: inventory, gate, connections, relay, remote evaluation, lab."""
