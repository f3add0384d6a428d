"""`ckpt simulate` compares policies on the same failures."""

from __future__ import annotations

import json

import pytest

JOB = ("--work", "2d", "--step", "10s", "--stall", "1", "--durable", "30", "--down", "2m", "--runs", "8")


def test_policies_are_compared(ckpt) -> None:
    code, out, _ = ckpt(
        *("simulate", *JOB, "--mtbf", "3h", "--keep", "latest: 2", "--json"),
        *("--save", '{"optimal": true}', "--save", "every_seconds: 3600"),
    )
    found = json.loads(out)
    assert code == 0
    optimal, hourly = found["policies"]
    assert optimal["goodput"] > hourly["goodput"]
    assert hourly["shares"]["lost"] > optimal["shares"]["lost"]
    assert optimal["most_kept"] == hourly["most_kept"] == 2
    for policy in found["policies"]:
        assert policy["goodput_95"][0] < policy["goodput"] < policy["goodput_95"][1]
        assert policy["goodput"] + sum(policy["shares"].values()) == pytest.approx(1)


def test_people_see_a_table(ckpt, tmp_path) -> None:
    record = tmp_path / "failures.csv"
    record.write_text("seconds\n5000\n9000\n")
    code, out, _ = ckpt("simulate", *JOB, "--trace", record, "--save", "100")
    assert code == 0
    assert "one failure in 1.944 h" in out
    assert "GOODPUT" in out
    assert "By the formula" in out


def test_the_rate_of_llama_3_depends_on_the_devices(ckpt) -> None:
    _, out, _ = ckpt("simulate", *JOB, "--trace", "llama3", "--devices", 16384, "--json")
    assert json.loads(out)["mtbf_seconds"] == pytest.approx(54 * 86400 / 419)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "needs --mtbf"),
        (("--trace", "llama3"), "needs --devices"),
        (("--trace", "no-file.csv"), "cannot read failures"),
        (("--mtbf", "6h", "--save", "sometimes: 5"), "unknown 'sometimes'"),
        (("--mtbf", "6 parsecs"), "is no number of seconds"),
        (("--mtbf", "6h", "--runs", "0"), "runs must be"),
        (("--mtbf", "6h", "--save", "every_tokens: 5"), "tokens is unknown here"),
    ],
)
def test_what_means_nothing_is_wrong_usage(ckpt, arguments, problem: str) -> None:
    code, _, err = ckpt("simulate", *arguments)
    assert code == 2
    assert problem in err
