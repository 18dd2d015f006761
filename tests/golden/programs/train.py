"""A training program with no defaults of its own."""

import sys

from dmltrain import fit

sys.exit(fit.main())
