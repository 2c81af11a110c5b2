"""``replayssm verify``: every backend on this machine against the float64 reference."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from replayssm.cli.args import check_backend

if TYPE_CHECKING:
    from replayssm.testing import VerifyRow


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("verify", help="check every backend on this machine against the float64 reference")
    parser.add_argument("--backend", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where a backend fails, or where none of those asked for runs here."""
    from replayssm.backends import names
    from replayssm.cli.checkpoint import check_device
    from replayssm.testing import verify_backends

    for name in args.backend or []:
        check_backend(name, auto=False)
    device = check_device(args.device)
    rows = []
    if not args.json:
        print(f"{'backend':10}  {'recurrence':10}  {'dtype':8}  {'T':>3}  {'error':>8}  {'allowed':>8}")
    for name in args.backend or names():
        rows += (new := verify_backends([name], device=device))
        if not args.json:
            print("\n".join(map(_line, new)), flush=True)
    done = [row for row in rows if not row.skipped]
    failed = [row for row in done if not row.ok]
    if args.json:
        print(json.dumps({"ok": bool(done) and not failed, "rows": [_plain(row) for row in rows]}, indent=2))
    else:
        print(f"\n{len(done) - len(failed)} of {len(done)} checks passed, {len(rows) - len(done)} skipped")
    return 0 if done and not failed else 1


def _plain(row: VerifyRow) -> dict[str, Any]:
    """For JSON, which knows no infinity."""
    return {key: None if value == math.inf else value for key, value in dataclasses.asdict(row).items()}


def _line(row: VerifyRow) -> str:
    case = f"{row.backend:10}  {row.recurrence:10}  {row.dtype:8}  {row.T:>3}"
    if row.skipped:
        return f"{case}  skipped: {row.skipped}"
    verdict = "ok" if row.ok else f"FAILED: {row.broken}" if row.broken else "FAILED"
    return f"{case}  {row.error:8.1e}  {row.allowed:8.1e}  {verdict}"
