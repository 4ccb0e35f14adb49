"""`python -m prequal`."""

from .cli import main

raise SystemExit(main())
