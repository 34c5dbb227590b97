"""Figures of the findings, derived a second way, and the intervals that they share."""

import numpy as np
import pytest
from scipy import stats

from lab.findings import (
    comparison,
    forgetting,
    generalise,
    lookup,
    objections,
    performance,
    real_model,
    recall,
    sdm,
    states,
    stored,
    text,
)
from lab.findings.needles import HALF, OPEN, shares, shares_by_seed
from lab.pages import finding, written
from lab.study.study import DOMAINS
from tests.benchmarks.programs import result_lines

RESULTS = stored.ROOT / "lab" / "results"


def lines(name):
    return result_lines(RESULTS / name)


def test_an_interval_over_seeds_is_student_s():
    values = [0.1, 0.4, 0.2]
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    np.testing.assert_allclose(stored.over_seeds(values)[1:], expected)
    assert f"{stored.over_seeds([0.5]):.2f}" == "0.50"
    assert stored.share_over_seeds([0.8, 1.0, 1.0]).high == 1.0


def test_an_interval_of_resampled_values_holds_the_mean():
    mean, low, high = stored.resampled(np.arange(100.0))
    assert (mean, low < 45 < 55 < high) == (49.5, True)


def test_an_interval_over_books_and_seeds_is_that_of_the_only_one_that_varies():
    books = np.array([0.1, 0.3, 0.2, 0.6])
    alone = stats.t.interval(0.95, 3, books.mean(), stats.sem(books))
    np.testing.assert_allclose(stored.over_books_and_seeds(np.tile(books, (3, 1)))[1:], alone)
    seeds = np.array([0.1, 0.3, 0.2])
    alone = stats.t.interval(0.95, 2, seeds.mean(), stats.sem(seeds))
    many = np.tile(seeds[:, None], (1, 50))
    np.testing.assert_allclose(stored.over_books_and_seeds(many)[1:], alone)


def test_an_interval_over_books_and_seeds_is_at_least_as_wide_as_over_either():
    rng = np.random.default_rng(1)
    for spread in (0.1, 0.5, 1.0, 3.0):
        for _ in range(50):
            values = rng.normal(size=(3, 1)) + spread * rng.normal(size=(1, 8))
            values = values + rng.normal(size=(3, 8))
            _, low, high = stored.over_books_and_seeds(values)
            for axis in (0, 1):
                _, least, most = stored.over_seeds(values.mean(axis=axis))
                assert high - low >= (most - least) * (1 - 1e-9)


def test_an_interval_over_books_and_seeds_holds_the_mean_of_others():
    rng = np.random.default_rng(0)

    def holds():
        values = rng.normal(size=(3, 1)) + rng.normal(size=(1, 8)) + rng.normal(size=(3, 8))
        _, low, high = stored.over_books_and_seeds(values)
        return low <= 0 <= high

    assert 0.93 < np.mean([holds() for _ in range(2000)]) < 0.99


def test_all_six_trainings_of_gates_at_a_half_count():
    found = [
        run["accuracy"]
        for name in ("study_cpu.jsonl", "study_second_cpu.jsonl")
        for line in lines(name)
        if line["run"] in ("gdn_swa__fwpkm:0", "gdn_swa__fwpkm:1", "gdn_swa__fwpkm:2")
        for run in line["needle_1x"]
        if run["readings"] == 1
    ]
    assert sorted(found) == sorted(shares(HALF, "needle_1x", readings=1))
    assert len(found) == 6
    assert len(shares(OPEN, "needle_1x", readings=1)) == 3


def test_trainings_of_one_seed_count_once_in_an_interval():
    trained = shares(HALF, "needle_1x", readings=1)
    by_seed = shares_by_seed(HALF, "needle_1x", readings=1)
    assert len(by_seed) == 3
    assert np.mean(by_seed) == pytest.approx(np.mean(trained))
    opened = shares_by_seed(OPEN, "needle_1x", readings=1)
    assert sorted(opened) == sorted(shares(OPEN, "needle_1x", readings=1))


def test_the_formulas_that_were_corrected_are_counted_as_corrected():
    own = [x for x in lines("state_tracking_cpu.jsonl") if x["rule"] in ("comba", "rwkv7")]
    assert {line["environment"]["date"] >= "2026-11-27" for line in own} == {True}
    assert len(own) == 18


def test_the_loss_of_unseen_books_is_of_every_book_and_training():
    found = []
    for seed in (0, 1, 2):
        of = {
            line["kind"]: line
            for line in lines("plain_text_cpu.jsonl")
            if (line["seed"], line["steps"], line["extra"]) == (seed, 4883, [])
        }
        # Sections of the first reading end at 512, 2,048, 8,192 and 24,000 bytes.
        found.append(np.subtract(of["fwpkm"]["writing"][3], of["backbone"]["frozen"][3]))
    np.testing.assert_allclose(text.difference(text.LONG, "later"), found)
    assert np.shape(found) == (3, 8)


def test_what_is_lost_of_domains_is_over_the_domains_that_the_gain_is_over():
    gain, loss = forgetting.domains("plain")
    own = [x for x in lines("retention_plain_text_cpu.jsonl") if x["measure"] == "domains"]
    own = [x["change"] for x in own if x["method"] == "plain" and x["batches"] == 32]
    assert {len(change["forgetting"]) for change in own} == {5}
    gains = [-np.mean([mean for mean, *_ in change["own"][:5]]) for change in own]
    assert gain.mean == pytest.approx(np.mean(gains))
    assert loss.mean == pytest.approx(
        np.mean([change["forgetting_mean"][0] for change in own]), abs=1e-6
    )


@pytest.mark.parametrize("name", [forgetting.UNREAD, forgetting.UNREAD_PLAIN_TEXT])
def test_each_domain_is_left_unread_once_in_every_training(name):
    own = [x for x in lines(name) if x["method"] == "plain"]
    trainings = {x["run"] for x in own}
    for training in trainings:
        left_out = [x["change"]["unread"] for x in own if x["run"] == training]
        assert sorted(left_out) == sorted([domain] for domain in DOMAINS)
    found = forgetting.unread(name)
    assert found.seeds == len(trainings)
    # As many domains are read in each line, and as many moments follow.
    changes = [x["change"] for x in own]
    gains = -np.mean([np.array(x["own"])[:, 0] for x in changes])
    moments = [np.array(x["unread_changes"])[0, :, 0] for x in changes]
    assert found.read.mean() == pytest.approx(gains)
    assert found.never.mean() == pytest.approx(-np.mean(moments))
    assert found.difference.mean == pytest.approx(gains + np.mean(moments))


def test_what_a_control_shows_depends_on_its_interval():
    def control(*differences):
        one = np.array([differences])
        return forgetting.Unread(tuple("abc"), one, np.zeros_like(one))

    assert control(1, 9, 2).largest == ("b", 1.5)
    said = {
        (2, 3, 4): "above zero in 3 of 3 pairs of domain and seed, shows adaptation",
        (1, 2, 9): "above zero in 3 of 3 pairs of domain and seed, is too uncertain to show",
        (-1, 2, 9): "above zero in 2 of 3 pairs of domain and seed, is too uncertain to show",
    }
    for differences, words in said.items():
        assert words in forgetting.difference(control(*differences))


def test_bytes_per_pair_are_the_state_over_the_most_pairs_answered():
    deltanet = comparison.MEMORIES[5]
    assert comparison.bytes_of(deltanet) == (8192, 8192)
    tests = [[x["pairs"] * x["accuracy"] for x in run["test"]] for run in comparison.runs(deltanet)]
    assert comparison.most_held(deltanet) == pytest.approx(max(np.mean(tests, axis=0)))
    assert {run["settings"]["tied_start"] for run in comparison.runs(deltanet)} == {True}
    wide, sparse = (comparison.bytes_of(comparison.MEMORIES[index]) for index in (6, 2))
    assert wide == (2 * 96 * 96 * 4,) * 2
    assert wide[0] == pytest.approx(sparse[0], rel=0.03)


def test_every_task_of_the_first_table_has_three_trainings_of_each_memory():
    assert sdm.three_seeds()


def test_fwpkm_and_sdm_had_the_same_training_and_almost_as_many_bytes():
    fwpkm, heads = (sdm.runs(memory) for memory in sdm.MEMORIES)
    assert [run["seed"] for run in fwpkm] == [0, 1, 2]
    assert [run["seed"] for run in heads] == [0, 1, 2]
    assert {run["steps"] for run in (*fwpkm, *heads)} == {160}
    about, other = (dict(run[0]["settings"]) for run in (fwpkm, heads))
    assert other.pop("tied_start")  # FwPKM has one map.
    assert about == other
    for name, most in (("state_bytes", 0.1), ("bytes_touched", 0.01)):
        assert heads[0][name] == pytest.approx(fwpkm[0][name], rel=most)
    right = [run["test"][0]["accuracy"] for run in heads]
    assert sdm.share("SDM").mean == pytest.approx(np.mean(right))


def test_an_answer_in_other_words_is_a_first_digit_and_the_five_after_it():
    line = next(x for x in lines("other_words_cpu.jsonl") if x["words"] == "a longer sentence")
    assert len(line["digits"]) == 6
    assert max(line["digits"]) <= line["samples"]
    trained, *_, longer = generalise.small()
    assert trained.words == "those of training"
    first, *later = np.array(line["digits"]) / line["samples"]
    assert longer.first.mean == pytest.approx(first)
    assert longer.later.mean == pytest.approx(np.mean(later))
    assert longer.exact.mean == line["exact"] / line["samples"]


@pytest.mark.parametrize(
    "module",
    [recall, generalise, lookup, text, forgetting, comparison, sdm, states, performance],
)
def test_a_table_has_at_most_eight_rows_of_at_most_six_cells(module):
    rows = module.table().splitlines()
    assert len(rows) <= 10
    assert {row.count("|") for row in rows} == {rows[0].count("|")}
    assert rows[0].count("|") <= 7
    assert module.draw().axes


def test_first_digits_in_new_words_are_over_books_and_sentences_alike():
    written = [x for x in lines("lookup_cpu.jsonl") if x["way"] == "written" and not x["given"]]
    written = [x for x in written if x["kind"] == lookup.WRITTEN.kind]
    one = next(x for x in written if x["words"] == "held out")
    found = lookup.estimate(lookup.WRITTEN, one["recipe"])
    assert found is not None
    same = [x for x in written if (x["recipe"], x["words"]) == (one["recipe"], "held out")]
    of_sentences = [np.array(x["by_sentence"])[:, 0].mean() for x in same]
    assert found.mean == pytest.approx(np.mean(of_sentences), abs=1e-4)
    assert found.low < found.mean < found.high
    links = lookup.by_link(lookup.WRITTEN, one["recipe"])
    assert list(links) == [8, 17, 29, 77]
    assert np.mean(list(links.values())) == pytest.approx(found.mean, abs=1e-4)


@pytest.mark.parametrize(("recipe", "said"), [("1", "one sentence"), ("64", "64 sentences")])
def test_a_pkm_above_is_said_with_what_its_lines_found(recipe, said):
    own = [
        x for x in lines("lookup_cpu.jsonl") if (x["kind"], x["recipe"]) == ("pkm_above", recipe)
    ]
    found = {x["way"]: x for x in own if x["words"] == "held out"}
    written, opened = (
        np.array(found[way]["by_book"])[:, 0].mean()
        for way in ("written", "neighbours, gates open")
    )
    shown = f"{said}: {written:.2f}, exact neighbours with open gates {opened:.2f}"
    assert shown in lookup.notes()
    (row,) = (
        x for x in lookup.results().splitlines() if x.startswith(f"| FwPKM, PKM above, {said}")
    )
    assert row.endswith(", ".join(f"{x:.2f}" for x in found["written"]["gates"]) + " |")


def test_every_objection_is_settled_by_lines_that_it_names():
    found = objections.rows()
    assert len(found) == 9
    for _, said, where, state in found:
        for name in (name.strip("` ") for name in where.split(",")):
            assert (stored.ROOT / name).is_dir() or stored.path_of(name).is_file()
        assert state == objections.SETTLED
        assert said


def test_a_part_of_a_page_is_replaced_up_to_the_next_empty_line():
    page = "# Page\n\n<!-- finding: recall answer -->\nold\nold, too\n\nOther text.\n"
    assert written(page, ()) == page.replace("old\nold, too", recall.answer())
    empty = page.replace("old\nold, too\n", "")
    assert written(empty, ()) == page.replace("old\nold, too", recall.answer())


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [("recal", "table", "recal is none of"), ("recall", "draw", "recall has no draw of")],
)
def test_a_finding_that_does_not_exist_is_named(name, part, message):
    with pytest.raises(ValueError, match=message):
        finding(name, part)


def test_what_a_real_model_answers_is_what_its_lines_say():
    found = [x for x in lines(real_model.LINES) if x["what"] == "asked"]
    of = {(x["sessions"], x["condition"]): x for x in found if x["memory"] == "shipped"}
    written = of["generated", "written"]
    assert f"says {written['exact']:.2f} [" in real_model.answer()
    low = written["exact"] - written["interval"]
    assert f"[{low:.2f}, " in real_model.answer()
    assert all(x["exact"] == 0 for (_, one), x in of.items() if one.endswith("not told"))
    fifty = next(row for row in real_model.results().splitlines() if "fifty other" in row)
    keeps = [
        of["generated", f"after fifty other facts{end}"]["exact"] for end in ("", real_model.KEEPS)
    ]
    assert [cell.split()[0] for cell in fifty.strip("| ").split(" | ")[2:4]] == [
        f"{x:.2f}" for x in keeps
    ]


def test_the_real_models_trainings_and_its_tasks_stand_on_the_page():
    page = (stored.ROOT / "docs/measurements/real_model.md").read_text()
    found = lines(real_model.LINES)
    last = [x for x in found if x["what"] == "training"][-1]
    rate = 1000 * round(last["tokens_per_second"] / 1000)
    steps = f"{last['step']:,} steps of {last['batch']} sessions, {rate:,} tokens per second"
    assert steps in page
    trained = [x for x in found if x["what"] == "further training"]
    further, ends = ([x for x in trained if ("full_read" in x) is late] for late in (False, True))
    first, second = (x["steps"] for x in further)
    assert f"Two trainings of {first} and {second} steps of {further[0]['batch']} sessions" in page
    (one,) = (x for x in found if x.get("memory") == "the first of two")
    assert f"the first alone: by hand {one['exact']:.2f}" in page
    for task in real_model.TASKS:
        both = [real_model.accuracy(task, memory) for memory in ("none", "shipped")]
        assert len({(x["documents"], x["harness"]) for x in both}) == 1
        row = " | ".join(f"{x['score']:.3f} ± {x['standard_error']:.3f}" for x in both)
        assert f": {both[0]['documents']} | {row} |" in page
    shipped = [x for x in found if x["what"] == "half-way" and x["weights"] == "half-way"]
    least = min(shipped, key=lambda x: x["full_read"])
    assert f"full_read={least['full_read']}" in page
    assert f"(perplexity {least['without_memory']:.0f} without a memory)" in page
    row = f"half-way of the last training | {least['full_read']} | {least['perplexity']:.0f} |"
    assert f"{row} {least['right']:.2f} |" in page
    (steps,) = {x["steps"] for x in ends}
    assert f"three of {steps} steps with `full_read={ends[0]['full_read']}`" in page
    assert {x["seed"] for x in ends} == {11, 12, 13}
    further = {
        x["sessions"]: f"{x['exact']:.2f}" for x in found if x.get("memory") == "one further pass"
    }
    assert f"gave {further['generated']} in generated sentences" in page
    assert f"{further['by hand']} and {further['by hand, second']} by hand" in page


def test_what_books_cost_a_real_model_is_what_its_lines_say():
    (line,) = (
        x
        for x in lines(real_model.LINES)
        if x["what"] == "loss of text" and x["condition"] == "a session of eight facts written"
    )
    last = real_model.costs().splitlines()[-1]
    assert f"{line['more']:+.3f} ± {line['interval']:.3f}" in last
    share = 100 * line["more"] / line["base"]
    assert f"({share:+.1f} ± " in last
