"""What takes a fleet's requests, on a Ray of its own: an HAProxy of ours, from which they go straight to the replicas.

``configuration`` (HAProxy's, as text), ``process`` (runs it, and switches where requests go), ``listener`` (what each
replica listens by). Ray Serve's own proxy is behind it too, for requests that must be routed by what is in them.
"""
