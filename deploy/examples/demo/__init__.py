"""The demo: a seed policy trained here, simulated users, and the whole loop turning on this machine."""
