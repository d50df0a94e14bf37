"""README.md and docs/numbers.md quote the latest measurements, and what was not measured says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.published.table import Column, Row, Table
from benchmarks.tables import PAGE, README, RESULTS, ROOT, Results, filled, look_up, main, markdown


def line(value: float, *, bench: str = "step", case: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    origin = {"gpu": "GPU", "commit": "0123456789abcdef", "date": "2026-12-01T00:00:00"}
    return {"bench": bench, "case": dict(case), "value": value, **origin, **extra}


def cell(lines: list[dict[str, Any]], column: Column, case: Mapping[str, Any]) -> str:
    return look_up(Results(lines), Row((), "step", case), column)[0]


def test_readme_and_page_agree_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_a_later_line_supersedes_an_earlier_one_of_the_same_case_only() -> None:
    lines = [line(1, case={"n": 1, "m": 2}), line(2, case={"m": 2, "n": 1}), line(3, case={"n": 1})]
    assert cell(lines, Column(""), {"n": 1, "m": 2}) == "2.0"


@pytest.mark.parametrize(
    ("show", "fields", "expected"),
    [
        ("**{:.1f}**", "value", "not measured"),
        ("{:.0%}", "share", "not measured"),
        ("{} {}", "times.0 vllm.value", "not measured"),
    ],
)
def test_what_no_line_has_is_not_measured(show: str, fields: str, expected: str) -> None:
    assert cell([line(1, case={"n": 2})], Column("", show, fields), {"n": 1}) == expected


def test_a_cell_says_which_of_its_numbers_is_not_measured() -> None:
    column, case = Column("", "{:.1f} ({:.1f})", "value vllm.value"), {"n": 1}
    peer = line(3, bench="vllm_step", case=case)
    assert cell([line(1, case=case), peer], column, case) == "1.0 (3.0)"
    assert cell([line(1, case=case)], column, case) == "1.0 (not measured)"
    assert cell([peer], column, case) == "not measured (3.0)"


def test_fields_are_of_lists_of_earlier_lines_and_of_other_benchmarks() -> None:
    lines = [
        line(1, case={"n": 1}, xla_us=7, ttft_s=[4, 5]),
        line(2, case={"n": 1}, ttft_s=[8, 9]),
        line(3, bench="load", case={"n": 1, "rank": 8}),
    ]
    assert cell(lines, Column("", "{}", "earlier.xla_us"), {"n": 1}) == "7"
    assert cell(lines, Column("", "{}", "xla_us"), {"n": 1}) == "not measured"
    assert cell(lines, Column("", "{}", "ttft_s.1"), {"n": 1}) == "9"
    assert cell(lines, Column("", "{}", "value", {"rank": 8}, "load"), {"n": 1}) == "3"


def test_a_row_has_the_origins_of_all_our_lines_that_it_quotes() -> None:
    columns = Column("a"), Column("b", case={"n": 2}), Column("c", fields="vllm.value")
    table = Table("t", "", "", ("",), columns, (Row(("x",), "step", {"n": 1}),))
    lines = [
        line(1, case={"n": 1}),
        line(2, case={"n": 2}, commit="fedcba9876+changes", date="2026-12-02"),
        line(3, bench="vllm_step", case={"n": 1}, commit="1111111"),
    ]
    assert markdown(Results(lines), table, origins=True).splitlines()[-1] == (
        "| x | 1.0 | 2.0 | 3.0 | 0123456, fedcba9+changes | 2026-12-01, 2026-12-02 | GPU |"
    )


def test_a_changed_number_is_found_named_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (README, PAGE, RESULTS):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, tmp_path / path)
    before = (tmp_path / README).read_text()
    case = {"model": "llama-2-7b", "setting": "S1", "n": 2000, "popularity": "zipf"}
    with (tmp_path / RESULTS / "engine.jsonl").open("a") as out:
        out.write(json.dumps(line(98.76, bench="offline_throughput", case=case)) + "\n")

    assert main(["--check"], tmp_path) == 1
    said = capsys.readouterr().out
    for path in (README, PAGE):
        assert f"{path} differs" in said
    for change in said.splitlines():
        assert not change.startswith("+|") or "**98.8**" in change
    assert said.count("**98.8**") == 2
    assert (tmp_path / README).read_text() == before

    assert main([], tmp_path) == 0
    assert main(["--check"], tmp_path) == 0
    assert "| **98.8** (12.6) |" in (tmp_path / README).read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- numbers: t -->\nnot closed",
        "<!-- numbers: t -->\n<!-- /numbers -->\n<!-- numbers: other -->\n<!-- /numbers -->",
        "<!-- numbers: t -->\n<!-- /numbers -->\n<!-- numbers: t -->\n<!-- /numbers -->",
    ],
)
def test_blocks_that_are_not_the_tables_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="each once and closed"):
        filled(text, Results([]), [Table("t", "", "", (), (), ())])


def test_the_rows_that_are_published_have_the_keys_of_recorded_cases() -> None:
    """Else they would say that nothing was measured, whatever is recorded."""
    results = Results.read(ROOT / RESULTS)
    published = [*tables.IN_README, *(table for some in tables.ON_PAGE.values() for table in some)]
    without = {
        (table.name, *row.labels)
        for table in published
        for row in table.rows
        if not any(look_up(results, row, column)[1] for column in table.columns)
    }
    assert without <= {("decode_llama-2-13b", "256", "256", "64/32/16/8")}


def test_each_table_has_a_name_and_rows_of_its_own() -> None:
    for some in (tables.IN_README, [table for part in tables.ON_PAGE.values() for table in part]):
        names = [table.name for table in some]
        assert len(set(names)) == len(names)
        for table in some:
            assert all(len(row.labels) == len(table.labels) for row in table.rows), table.name
            assert len({row.labels for row in table.rows}) == len(table.rows), table.name
