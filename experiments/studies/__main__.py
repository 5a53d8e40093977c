"""`python -m experiments.studies`: see document.py."""

import sys

from experiments.studies.document import main

sys.exit(main())
