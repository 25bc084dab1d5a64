"""The model types that are served right, as ``tests/test_families.py`` finds them one by one.

A model of another type is not refused for it: it is compared with itself first (``rehearsal``).
"""

SERVED: frozenset[str] = frozenset()
