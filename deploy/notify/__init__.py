"""Tells other systems what the loop has done.

Read ``events`` (what happened, from what is on record), then ``webhooks`` (sends it, with retries, from a thread of the
scheduler).
"""
