"""`python -m splitkv`: see `splitkv.cli`."""

from splitkv.cli import main

raise SystemExit(main())
