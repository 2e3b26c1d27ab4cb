"""`python benchmarks/peers`."""

import sys

from comparisons import main

sys.exit(main())
