"""Reports on roots: what they say of a known history, and what they make of a damaged or hostile one."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import sys
import time
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

from ckpt_core import CheckpointManager, EverySteps, KeepEvery, KeepLatest, SaveError, TrainState, Upload
from ckpt_core.cadence import expected_overhead, optimal_interval
from ckpt_core.cli import main
from ckpt_core.commit import Catalog
from ckpt_core.journal import read_events, read_history
from ckpt_core.journal._journal import RunLog, Training
from ckpt_core.names import OWN, run_file
from ckpt_core.reporting import page, report_of, seconds_text, sections
from ckpt_core.reporting._facts import share_text
from ckpt_core.reporting._sections import _drawn
from ckpt_core.storage import open_storage
from ckpt_core.telemetry import Event
from tests.kit.clock import FakeClock

BEGIN = 1_795_000_000.0
NOW = BEGIN + 30 * 86_400


def line(kind, time, run, **fields):
    return {"v": 1, "kind": kind, "time": time, "run": run, **fields}


def run_of(run, begin, *, saves, end, lost=0.0, first=0, every=100.0):
    """A run that saves each 100 s and 50 steps; a stall of 2 s, and 1 s of slower steps."""
    start = line("run", begin, run, event="resume" if first else "start", step=first, world_size=8, devices=8)
    lines, step, time = [start], first, begin
    for _ in range(saves):
        time, step = time + every, step + 50
        lines.append(
            line(
                "save", time, run, step=step, name=f"step-{step:09}", reason="every 50 steps",
                stall_seconds=2.0, slowdown_seconds=1.0, durable_seconds=10.0, size_bytes=1 << 30,
                overhead=0.03, outcome="committed",
            )
        )  # fmt: skip
        lines.append(line("progress", time, run, step=step, training_seconds=time - begin))
    if end:
        fields = {"seconds": time - begin, "lost_seconds": lost, "lost_steps": int(lost / 2)}
        last = step + fields["lost_steps"]  # it trained on after its last save
        lines.append(line("run", time + 60, run, event=end, step=last, world_size=8, devices=8, **fields))
    return lines


JOURNAL = run_file(BEGIN, "all")


def written(root, lines):
    (root / OWN).mkdir(parents=True, exist_ok=True)
    (root / JOURNAL).write_text("".join(json.dumps(each) + "\n" for each in lines))
    return open_storage(str(root))


def two_runs():
    died = run_of("aaaa", BEGIN, saves=10, end="unclean", lost=50.0)
    load = line(
        "load", BEGIN + 1200, "bbbb", step=500, name="step-000000500", tier="root", seconds=20.0,
        size_bytes=1 << 30, outcome="done",
    )  # fmt: skip
    return [*died, load, *run_of("bbbb", BEGIN + 1200, saves=10, end="end", first=500)]


class Page(HTMLParser):
    """Checks that tags are closed, and notes them."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_goodput_is_training_without_stalls_slowdown_lost_work_and_loads(tmp_path):
    report = report_of(written(tmp_path / "run", two_runs()), NOW)
    balance = report.balance

    assert (balance["covered"], balance["stall"], balance["slowdown"]) == (2000.0, 40.0, 20.0)
    assert (balance["lost"], balance["loading"]) == (50.0, 20.0)
    assert balance["down"] == 200.0  # from the last sign of the run that died to the next start
    assert report.goodput == pytest.approx((2000 - 40 - 20 - 50) / 2020)


def shares(root):
    """The report's shares of time, in the table that users see."""
    (found,) = (each for each in sections(report_of(open_storage(root), NOW)) if each.title == "Goodput")
    return {name: float(share.removesuffix(" %")) for name, _, share in found.rows}


@pytest.mark.parametrize("least_slowdown", [-30.0, -1.0])
def test_a_slowdown_below_the_noise_of_steps_is_no_time_gained(tmp_path, capsys, least_slowdown):
    lines = run_of("aaaa", BEGIN, saves=3, end="end") + run_of("bbbb", BEGIN + 900, saves=3, end="end")
    for each in lines:
        if each["kind"] == "save":
            each["slowdown_seconds"] = least_slowdown
    report = report_of(written(tmp_path / "run", lines), NOW)

    assert report.balance["slowdown"] == 0.0
    assert report.goodput == pytest.approx(1 - 6 * 2 / 600)
    assert report.optimum["cost"] == 2.0  # there is an optimum: no save earns time
    assert sum(shares(str(tmp_path / "run")).values()) == pytest.approx(100, abs=0.1)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "98.0 % was training that counts" in capsys.readouterr().out


def test_stalls_within_lost_work_are_counted_once(tmp_path):
    died = run_of("aaaa", BEGIN, saves=4, end="unclean", lost=400.0)
    for each in died:  # it blocks for nearly all its time, and no save commits
        if each["kind"] == "save":
            each.update(stall_seconds=95.0, outcome="failed")
    died[-1] |= {"step": 200, "lost_steps": 200}
    report = report_of(written(tmp_path / "run", died), NOW)
    balance = report.balance

    assert (balance["covered"], balance["stall"], balance["slowdown"]) == (400.0, 380.0, 4.0)
    assert balance["lost"] == 400.0 - 380.0 - 4.0  # trained, and lost
    assert report.goodput == 0.0
    assert sum(shares(str(tmp_path / "run")).values()) == pytest.approx(100, abs=0.1)


def test_a_load_amid_a_run_is_no_training_too(tmp_path):
    lines = run_of("aaaa", BEGIN, saves=10, end="end")
    amid = {"step": 250, "name": "step-000000250", "tier": "root", "outcome": "done", "seconds": 40.0}
    lines.insert(12, line("load", BEGIN + 530, "aaaa", **amid))
    report = report_of(written(tmp_path / "run", lines), NOW)
    balance = report.balance

    assert (balance["covered"], balance["loading"]) == (960.0, 40.0)
    assert report.goodput == pytest.approx((960 - 20 - 10) / 1000)


def test_the_stall_of_a_save_that_fails_lies_within_the_training(tmp_path):
    class Failing(TrainState):
        def capture(self):
            hashlib.sha256(bytes(64 << 20)).digest()  # it takes its time
            raise RuntimeError("no state")

    root = tmp_path / "run"
    with CheckpointManager(root, save=EverySteps(1)) as manager:
        manager.maybe_save(1, {"w": torch.zeros(8)})
        manager.wait()
        with pytest.raises(SaveError, match="no state"):
            manager.maybe_save(2, Failing(model=torch.nn.Linear(1, 1)))
    report = report_of(open_storage(str(root)), time.time())
    failed = report.events["save"][-1]
    assert failed["outcome"] == "failed"
    assert failed["stall_seconds"] > 0.01
    assert report.balance["stall"] <= report.balance["covered"] + 0.001


def test_the_optimum_is_that_of_the_formulas_and_of_the_mtbf_given(tmp_path):
    given = line(
        "cadence", BEGIN + 1, "aaaa", rule="Optimal()", interval_seconds=100.0, mtbf_seconds=7200.0,
        mtbf_source="given",
    )  # fmt: skip
    found = report_of(written(tmp_path / "run", [given, *two_runs()]), NOW).optimum

    known = {"cost": 3.0, "durable": 10.0, "mtbf": 7200.0}
    assert (found["mtbf"], found["interval"], found["interval_steps"]) == (7200.0, 100.0, 50.0)
    assert found["best_interval"] == optimal_interval(**known)
    assert found["overhead"] == expected_overhead(100.0, **known, restart=20.0)
    assert found["best_steps"] == pytest.approx(found["best_interval"] / 2)


def test_without_a_given_mtbf_it_is_learned_from_the_history(tmp_path):
    found = report_of(written(tmp_path / "run", two_runs()), NOW).optimum
    assert "1 failure" in found["mtbf_source"]
    assert found["mtbf"] > 0


def test_a_rotated_log_counts_only_the_training_that_its_events_cover(tmp_path):
    lines = run_of("aaaa", BEGIN, saves=10, end="end")
    rest = [lines[0], *lines[11:]]  # of a long run its start stays, and what follows the save after 600 s
    report = report_of(written(tmp_path / "run", rest), NOW)
    covered = {run["run"]: run["covered"] for run in report.runs}
    assert covered == {"aaaa": 1000.0}  # it is known where it began


def test_a_run_whose_start_is_gone_is_counted_from_its_first_sign(tmp_path):
    lines = run_of("aaaa", BEGIN, saves=10, end="")[11:]
    assert report_of(written(tmp_path / "run", lines), NOW).balance["covered"] == 400.0


@pytest.mark.parametrize("torn", ['{"v":1,"kind":"sa', "\x00\xff not ours", "[]", "null", '{"v":1}'])
def test_torn_and_foreign_lines_change_nothing(tmp_path, torn):
    storage = written(tmp_path / "run", two_runs())
    before = report_of(storage, NOW)
    with (tmp_path / "run" / JOURNAL).open("a", encoding="utf-8") as file:
        file.write(torn)
    assert report_of(storage, NOW) == before


@pytest.mark.parametrize("jump", [-1e12, -1e6, 1e6, 1e11])
def test_clocks_that_jump_make_no_negative_figure_and_a_page(tmp_path, jump):
    lines = two_runs()
    for each in lines[len(lines) // 2 :]:
        each["time"] += jump
    report = report_of(written(tmp_path / "run", lines), NOW)
    balance = report.balance
    assert (
        min(balance["covered"], balance["stall"], balance["lost"], balance["down"], balance["loading"]) >= 0
    )
    assert 0 <= report.goodput <= 1
    Page(page(report))


PNG = "data:image/png;base64,"
HOSTILE = "</style><script>alert(1)</script><img src=http://x onerror=y>\x1b[31m\u202e&\"'"


def test_nothing_of_a_hostile_journal_becomes_a_tag_or_a_control_code(tmp_path, capsys):
    lines = two_runs()
    for each in lines:
        for field in ("reason", "name", "error", "tier"):
            each[field] = HOSTILE
    lines[1]["outcome"] = "failed"
    lines += [
        line("prune", BEGIN, HOSTILE, names=[HOSTILE], size_bytes=1, why=HOSTILE, tier=HOSTILE),
        line("cadence", BEGIN, HOSTILE, rule=HOSTILE, mtbf_source=HOSTILE, interval_seconds=1.0),
        line("run", BEGIN, HOSTILE, event=HOSTILE, step=1, world_size=1, devices=1),
    ]
    report = report_of(written(tmp_path / "run", lines), NOW)
    found = Page(page(report))

    assert {tag for tag, _ in found.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "div", "dt", "dd"),
        *("section", "table", "tr", "th", "td", "img"),
    }
    for _, attributes in found.tags:
        assert not {name for name in attributes if name.startswith("on") or name == "href"}
        assert attributes.get("src", PNG).startswith(PNG)
    assert "alert(1)" in "".join(found.text)  # shown, as text
    assert not set(page(report)) & {"\x1b", "\u202e"}
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_page_needs_no_network_and_its_picture_is_whole(tmp_path):
    text = page(report_of(written(tmp_path / "run", two_runs()), NOW))
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text
    (picture,) = (each["src"] for tag, each in Page(text).tags if tag == "img")
    content = base64.b64decode(picture.removeprefix(PNG), validate=True)
    assert content.startswith(b"\x89PNG")
    assert content.endswith(b"IEND\xaeB`\x82")


def test_without_matplotlib_the_page_has_no_picture_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = Page(page(report_of(written(tmp_path / "run", two_runs()), NOW)))
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert any("install ckpt-suite[report]" in text for text in found.text)


def test_thousands_of_saves_make_a_page_of_bounded_size(tmp_path):
    sizes = []
    for count in (2_000, 8_000):
        lines = run_of("aaaa", BEGIN, saves=count, end="end")
        sizes.append(len(page(report_of(written(tmp_path / str(count), lines), NOW))))
    assert sizes[1] < 1.1 * sizes[0]
    assert sizes[1] < 200_000


def test_a_root_without_a_journal_says_what_is_not_known(tmp_path, ckpt_root):
    for path in (ckpt_root / OWN).glob("*.jsonl"):
        path.unlink()
    storage = open_storage(str(ckpt_root))
    assert read_events(storage) == read_history(storage) == []
    report = report_of(storage, NOW)

    assert len(report.checkpoints) == len(Catalog(storage).committed()) == 2
    assert report.goodput is None
    assert report.optimum is None
    assert any("no journal" in text for text in report.unknown)
    assert {each.title for each in sections(report)} == {"Advice", "In the root now", "Not known"}
    Page(page(report))


def test_the_command_writes_text_json_and_a_page(tmp_path, capsys):
    written(tmp_path / "run", two_runs())
    assert main(["report", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "Goodput:" in text
    assert "1 unclean" in text

    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["goodput"] == pytest.approx(1890 / 2020)
    assert len(fields["events"]["save"]) == 20

    target = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), "--html", str(target)]) == 0
    Page(target.read_text(encoding="utf-8"))
    assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "none" / "x.html")]) == 2


def test_a_report_on_nothing_is_exit_code_3(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note.txt").write_text("mine")
    assert main(["report", str(tmp_path / "run")]) == 3


@pytest.fixture
def ckpt_root(tmp_path):
    from ckpt_core import CheckpointManager

    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"model": {}, "value": step})
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("span", "shown", "offset"),
    [
        (0.25, ".05", "2026-Nov-18"),
        (90.0, "11:07", "2026-Nov-18"),
        (7200.0, "12:00", "2026-Nov-18"),
        (90 * 86_400.0, "Dec", "2027"),
    ],
)
def test_an_axis_is_as_exact_as_its_span_needs(tmp_path, span, shown, offset):
    lines = run_of("aaaa", BEGIN, saves=2, end=None, every=span / 2)
    figure = _drawn(report_of(written(tmp_path / "run", lines), BEGIN + 100 * 86_400))

    figure.canvas.draw()
    axes = figure.axes[-1]
    labels = [each.get_text() for each in axes.get_xticklabels()]
    labels.append(axes.xaxis.get_major_formatter().get_offset())
    assert any(shown in label for label in labels), labels
    assert any(offset in label for label in labels), labels
    low, high = axes.get_xlim()
    marks = axes.lines[-1].get_xdata(orig=False)
    assert (max(marks) - min(marks)) / (high - low) > 0.3  # also a run of milliseconds fills the axis


@pytest.fixture(params=["file", "memory"])
def place(request, tmp_path):
    return f"file://{tmp_path}/run" if request.param == "file" else f"memory://{secrets.token_hex(6)}/run"


def test_a_report_says_which_rules_kept_and_deleted_what_in_each_tier(place, tmp_path, capsys):
    tier = f"{tmp_path}/tier"
    keep = KeepLatest(2) | KeepEvery(4)
    upload = Upload(tier, every=2, keep=KeepLatest(1), when_busy="queue")
    with CheckpointManager(place, save=EverySteps(1), keep=keep, upload=upload) as manager:
        for step in range(1, 8):
            manager.maybe_save(step, {"w": torch.zeros(8)})
            manager.wait()
    storage = open_storage(place)
    report = report_of(storage, NOW)
    found = {section.title: section for section in sections(report)}

    by_tier = {each["tier"]: each["kept"] for each in report.events["retention"]}
    assert by_tier["root"] == {"newest": [7], "KeepLatest(n=2)": [6, 7], "KeepEvery(steps=4)": [4]}
    assert by_tier[tier] == {"newest": [7], "KeepLatest(n=1)": [7]}
    rows = found["What retention did"].rows
    assert ("root", "kept", "KeepEvery(steps=4)", "1", "4") in rows
    assert {(row[0], row[1]) for row in rows} == {(t, w) for t in ("root", tier) for w in ("kept", "deleted")}
    assert found["In the root now"].lines[0].startswith("3 checkpoints, ")
    assert main(["ls", place, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {each["step"]: each["kept_as"] for each in listed} == {
        7: ["KeepLatest(n=2)", "newest"],
        6: ["KeepLatest(n=2)"],
        4: ["KeepEvery(steps=4)"],
    }
    assert main(["report", place, "--html", str(tmp_path / "page.html")]) == 0
    assert "KeepEvery(steps=4)" in Page((tmp_path / "page.html").read_text()).text


def killed_after(clock, lines, run, *, begin, last, every, seconds):
    """Train on a clock that only this moves, write what the journal's thread writes, and stop dead."""
    training = Training()
    log = RunLog("root", training, clock)
    log.begin(run, 1)
    log.continue_from({"earlier": lines})
    if begin:
        training.resumed.append(((begin, clock(), clock()), None))
    training.first = training.last = (begin + 1, clock(), clock())
    for step in range(begin + 2, last + 1):
        for _ in range(10):
            clock.advance(seconds / 10)
            if log.next_look(clock()) <= 0:
                log.look(closing=False)
        training.last = (step, clock(), clock())
        if step % every == 0:
            log.take(Event(name="save.commit", phase="finished", time=clock(), attributes={"step": step}))
            log.look(closing=False)
    clock.advance(seconds / 3)  # in the middle of a step
    return [*lines, *log.lines]


@pytest.mark.parametrize(
    ("every", "seconds", "kills"),
    [
        (20, 0.1, (57, 83, 131)),
        (20, 3.0, (57, 83, 131)),
        (5, 0.01, (6, 7, 9)),
        (1000, 0.5, (400, 900)),
        (7, 40.0, (20, 27)),
    ],
)
def test_work_lost_by_killed_runs_is_a_bound_below_the_truth_and_not_far_below(
    tmp_path, capsys, every, seconds, kills
):
    clock, lines, lost, begin = FakeClock(BEGIN), [], [], 0
    for number, last in enumerate(kills):
        lines = killed_after(
            clock, lines, f"run{number}", begin=begin, last=last, every=every, seconds=seconds
        )
        begin = last // every * every
        lost.append(last - max(begin, 0))
    lines = killed_after(clock, lines, "last", begin=begin, last=begin + 3, every=every, seconds=seconds)
    root = tmp_path / "run"
    report = report_of(written(root, lines), NOW)
    dead = report.runs[:-1]

    assert [run["end"] for run in report.runs] == ["unclean"] * len(kills) + [""]
    for run, truly in zip(dead, lost, strict=True):
        assert not run["exact"]
        assert run["lost_steps"] <= truly
        # Known to half, to a second or a minute, and to a step; the first step has no time.
        truth = truly * seconds
        assert truth - 1.5 * seconds - max(1.0, min(60.0, truth / 2)) <= run["lost_seconds"] <= truth + 0.001
        assert run["until"] - run["begin"] >= run["seconds"] - 0.001
    assert main(["report", str(root)]) == 0
    text = capsys.readouterr().out
    known = sum(run["lost_steps"] for run in dead)
    assert (
        f"lost at least {seconds_text(sum(run['lost_seconds'] for run in dead))} of training ({known:,}"
        in text
    )
    assert f"measured, at most {share_text(report.goodput)} was training that counts" in text
    for run in dead:
        row = next(line for line in text.splitlines() if line.startswith(f"{run['run']} "))
        assert row.count("at least") == 3  # the time trained, steps lost, time lost
    shown = page(report)
    assert shown.count("at least") >= 3 * len(dead) + 2
    assert "<dd>at most" in shown
    assert main(["report", str(root), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["balance"]["exact"] is False
    assert [each["exact"] for each in fields["runs"]] == [False] * len(report.runs)


def test_a_run_that_wrote_its_own_end_has_exact_figures(tmp_path, capsys):
    lines = run_of("aaaa", BEGIN, saves=3, end="end")
    assert report_of(written(tmp_path / "run", lines), NOW).balance["exact"]
    assert main(["report", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "at least" not in text
    assert "at most" not in text


@pytest.mark.parametrize("object_store", [False, True])
@pytest.mark.parametrize("way", ["decides", "saves without asking", "waits for each", "dies"])
def test_each_record_has_the_time_of_its_event_and_figures_agree(tmp_path, way, object_store):
    place = f"memory://{secrets.token_hex(6)}/run" if object_store else str(tmp_path / "run")
    asked, state = {}, {"w": torch.zeros(256)}

    def train():
        with CheckpointManager(place, save=EverySteps(1)) as manager:
            for step in range(1, 9):
                before = time.time()
                if way == "saves without asking":
                    manager.save(step, state)
                else:
                    manager.maybe_save(step, state)
                asked[step] = before, time.time()
                if way == "waits for each":
                    manager.wait()
            if way == "dies":
                manager.wait()
                raise RuntimeError("out of memory")

    if way == "dies":
        with pytest.raises(RuntimeError, match="out of memory"):
            train()
    else:
        train()
    report = report_of(open_storage(place), time.time())
    (run,) = report.runs
    saves = report.events["save"]
    assert [each["step"] for each in saves] == list(asked)
    for each in saves:
        before, after = asked[each["step"]]
        assert before - 0.001 <= each["time"] <= after + 0.001
        assert run["begin"] - 0.001 <= each["time"] <= run["until"] + 0.001
    assert run["until"] - run["begin"] >= run["seconds"] - 0.002
    assert report.balance["stall"] <= report.balance["covered"] + 0.001
    assert report.optimum["interval"] >= min(b[0] - a[1] for a, b in pairwise(asked.values()))
