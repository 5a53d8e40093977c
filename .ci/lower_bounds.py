"""Prints setup.py's requirements with every lower bound as the exact version, for pip's --constraint.

`dev` names all extras and the tools of the tests. What these packages need in turn is left to pip.
"""

import importlib.metadata

for requirement in importlib.metadata.requires("fedcodist") or []:
    bounds, _, marker = requirement.partition(";")
    if not marker or "dev" in marker:
        print(bounds.strip().replace(">=", "=="))
