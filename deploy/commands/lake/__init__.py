"""The commands that read, keep and exchange the lake's rows.

``group`` (the group lake), ``query`` (lake sql, lake stats), ``maintenance`` (lake compact, vacuum, retain, erase,
maintain), ``data`` (data export, data import).
"""
