"""All settings: ``root`` composes what each package declares, ``sources`` says where values come from, ``describe``
explains keys and finds the nearest right one.
"""
