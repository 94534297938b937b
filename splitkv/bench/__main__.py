from splitkv.bench.cli import run

raise SystemExit(run())
