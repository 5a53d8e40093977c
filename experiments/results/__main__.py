"""`python -m experiments.results`: see document.py."""

import sys

from experiments.results.document import main

sys.exit(main())
