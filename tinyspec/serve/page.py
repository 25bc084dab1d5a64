"""The page at ``/``, and the verifies that it draws. The page is one file, which loads nothing."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse

from tinyspec.engine.trace import Trace
from tinyspec.tools.trace import Run, verify_diagram, whole_verifies

HTML = Path(__file__).with_name("page.html")
HEADERS = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
HEADERS |= {"X-Content-Type-Options": "nosniff"}
# The page's own script and style, its icon, and requests to the server it came from: nothing else.
POLICY = "default-src 'none'; script-src {script}; style-src {style}; img-src data:; "
POLICY += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page(facts: dict[str, Any]) -> HTMLResponse:
    """It reads in its head which of these ``facts`` of the server are true."""
    told = " ".join(name for name, true in facts.items() if true)
    text = HTML.read_text(encoding="utf-8").replace("{{facts}}", told)
    parts = re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL)
    digests = {name: b64encode(sha256(part.encode()).digest()).decode() for name, part in parts}
    policy = POLICY.format(**{name: f"'sha256-{digest}'" for name, digest in digests.items()})
    return HTMLResponse(text, headers={**HEADERS, "Content-Security-Policy": policy})


def last_verifies(trace: Trace, request_id: str) -> list[dict[str, Any]]:
    """Of one request its last verify, and its last with a rollback, where that is another; of other
    requests no more than how many there were."""
    works = [w for one in trace.passes() for w in one.works if w.request_id == request_id]
    tokens = {t for w in works for t in (*w.tokens, *w.drafts, *w.targets, w.newest) if t >= 0}
    run = Run(trace.passes(), {token: trace.tokenizer.decode([token]) for token in tokens})
    found = [part for part in whole_verifies(run) if part[1].request_id == request_id]
    undone = [part for part in found if part[1].rejected]
    last = {part[0].number: part for part in (*found[-1:], *undone[-1:])}
    return [asdict(verify_diagram(run, *part, "this answer")) for part in last.values()]
