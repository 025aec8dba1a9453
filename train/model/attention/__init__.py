"""Attention over a packed batch, span by span: no score across sequences is computed.

Read ``packed`` (what models call; which way each call takes) with ``calls`` (which spans are computed at once). Then
``shared`` (responses attend to their prompt where it lies) with the kernels ``flash`` (of a GPU) and ``cpu`` (of a
CPU), and ``tiled`` (soft caps, sinks and windows anywhere: tiles of scores instead of all of them).
"""
