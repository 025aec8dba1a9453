"""The demo: a seed policy made here, simulated users, and the whole loop turning on this machine."""
