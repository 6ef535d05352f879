"""The page of all results: what papers claim, and what this machine measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from common import table

from papers.claims import PaperResult

HEAD = """# Papers as tests

See which results of papers this program reproduces on two CPU cores, and which it does not.

```bash
make papers ONLY=kl_gradients    # one row, measured again; QUICK=1 shows the code at work
```

`make papers` measures all rows. Each is a module of `benchmarks/papers/`, with the paper's claim
and a criterion that was committed before the first run and is not edited after it, but for five
rows whose *Note* says what came first; a failed criterion stays in the table, and a wrong one
has a second one beside it. *Cannot be told* means that the intervals are too wide for either
answer. Each row with seeds of training is one look at 5 %, and the page has {looks} rows: of as
many claims without any effect one in forty would pass by chance and one in forty fail. Models,
tasks and budgets are far smaller than the papers': a failed row says that the claim does not
hold here, not that it is wrong there.

"""


def write_page(results: Mapping[str, PaperResult], folder: Path, page: Path) -> None:
    """Write the page from the figures in ``folder``; a result without figures is not measured."""
    rows, sections = [], []
    for name, result in results.items():
        file = folder / f"{name}.json"
        found = json.loads(file.read_text()) if file.exists() else None
        outcome = found["outcome"] if found else "not measured"
        seeds = str(len(found["seeds"])) if found else "-"
        rows.append([f"[{result.title}](#{_anchor(result.title)})", outcome, seeds])
        sections.append(_section(name, result, found))
    looks = sum((folder / f"{name}.json").exists() for name in results)
    text = (
        HEAD.format(looks=looks)
        + table(["result", "outcome", "seeds"], rows)
        + "\n\n"
        + "\n".join(sections)
    )
    page.write_text(text)


def _section(name: str, result: PaperResult, found: dict[str, object] | None) -> str:
    lines = [
        f"## {result.title}\n",
        f"- **Claim** ({result.source}): {result.claim}",
        f"- **Criterion**: {result.criterion}",
        *([f"- **Needs** {result.needs}"] if result.needs else []),
    ]
    if found is None:
        lines.append(f"- **Not measured**: `make papers ONLY={name}`")
        return "\n".join(lines) + "\n"
    seeds = found["seeds"]
    assert isinstance(seeds, dict)
    minutes = result.minutes * len(seeds)  # seconds leave out runs that other rows have made
    machines = [each["machine"] for each in seeds.values()]
    places = {f"{each['processor']}, {each['cpu_kind']}" for each in machines}
    commits = {each["commit"] for each in machines}
    lines += [
        f"- **{str(found['outcome']).capitalize()}**: {found['found']}",
        *([f"- **Note**: {result.note}"] if result.note else []),
        f"- {len(seeds)} seeds, about {minutes:g} minutes of one core in all, commit "
        f"{', '.join(sorted(commits))} ({'; '.join(sorted(places))}); `make papers ONLY={name}`",
    ]
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    kept = "".join(each for each in title.lower() if each.isalnum() or each in " -")
    return kept.replace(" ", "-")
