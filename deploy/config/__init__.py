"""All settings: ``root`` (composes what each package declares), ``sources`` (where values come from: options,
environment, file), ``yaml_text`` (the keys of a YAML text), ``wording`` (what a setting must be), ``describe`` (keys
and their meaning, the nearest right key, YAML), ``differences`` (between two snapshots, with secrets masked),
``reference`` (all settings on a terminal), ``json_schema`` (types in a few words, for the reference and the docs).
"""
