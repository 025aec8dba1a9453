"""What the data plane does on this machine and this disk: rates and latencies, measured on rows like real ones."""
