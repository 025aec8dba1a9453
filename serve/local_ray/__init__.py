"""A Ray on this machine that belongs to the process that starts it: ``cluster`` (starts it, on loopback and with a
token of its own, and ends it), ``reaper`` (kills what is left of it when its owner has died).
"""
