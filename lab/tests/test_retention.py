"""The program behind the table of ways to retain, on made-up results and a tiny run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.core.streams.pending import Pending
from fwpkm_jax.data import TextData
from fwpkm_jax.generation import init_generation
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.paper.evaluation.domains import read_domains
from fwpkm_jax.rules import SDM, FwPKM
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from lab.study import retention, retention_domains, retention_facts, retention_tables
from tests.benchmarks.programs import result_lines, run
from tests.training.tiny_config import get_config

DOMAINS = ("one", "two", "three")


def read(model, memory):
    return model.hidden(jnp.zeros((2, 8), jnp.int32), memory).memory


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A run whose text is two books without a common letter, and a folder of three domains."""
    folder = tmp_path_factory.mktemp("texts")
    books = folder / "books.jsonl"
    texts = ("abcd efg " * 60, "xyz uvw " * 60)
    books.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name in DOMAINS:
        (folder / name).mkdir()
        for part in ("train", "valid"):
            (folder / name / f"{part}.txt").write_text(f"{name} " * 100)
    experiment = get_config()
    model = dataclasses.replace(experiment.model, vocab_size=257)
    data = TextData(length=16, train_paths=(str(books),), valid_paths=(str(books),))
    experiment = dataclasses.replace(experiment, model=model, data=data)
    state = init_state(model, memory=experiment.training.memory, optimizer=None, seed=0)
    return Run(experiment, model_graph(model), state.params, state.memory, 0), folder


def test_each_write_has_the_runs_weights_and_what_it_remembers(made_up):
    made_up, _ = made_up
    plain = made_up.model.config.fast_weight.rule
    assert isinstance(plain, FwPKM)
    read_with = set()
    for method in retention.METHODS.values():
        if method.neighbours is not None:
            continue
        model, memory = retention.written_so(made_up, method)
        rule = model.config.fast_weight.rule
        assert isinstance(rule, FwPKM)
        assert rule.value_step == method.step * plain.num_heads * plain.top_k
        assert rule.addressing_weight == method.keys * plain.addressing_weight
        assert rule.inner_steps == method.inner_steps or method.inner_steps is None
        changed = {"value_step": None, "addressing_weight": 1.0, "retention": None}
        changed |= {"inner_steps": 1}
        assert dataclasses.replace(rule, **changed) == plain
        (layer,) = memory.values()
        assert (layer.history is None) == (method.retention is None)
        options = dataclasses.asdict(method.retention or retention.Retention())
        kind = (*(name for name, value in options.items() if value), method.inner_steps is None)
        if kind in read_with:  # Other sizes of the same options read alike.
            continue
        read_with.add(kind)
        written = jax.eval_shape(read, model, memory)
        assert jax.tree.structure(written) == jax.tree.structure(memory)


def test_a_store_answers_what_was_told_after_other_text_while_it_holds_it(made_up):
    made_up, _ = made_up
    draw = np.random.default_rng(0)

    def layers_of(state, layer):
        """Twelve tokens of two people that wait, eleven of them with a target."""
        one = state.stream.layers[layer]
        signals = jax.tree.map(lambda x: jnp.asarray(draw.random(x.shape)), one.pending.tokens)
        signals = signals._replace(mask=jnp.ones_like(signals.mask))
        pending = Pending(signals, jnp.full_like(one.pending.num_waiting, 12))
        return {**state.stream.layers, layer: one._replace(pending=pending)}

    model, memory = retention.written_so(made_up, retention.Method(neighbours=64))
    (layer,) = memory
    state = init_generation(model, memory, batch=2, max_length=12, max_chunk_size=11)
    told, other = layers_of(state, layer), layers_of(state, layer)
    signals = told[layer].pending.tokens
    weight = np.concatenate([x[layer].pending.tokens.gate[:, 0, :11] for x in (told, other)], 1)
    strongest = (np.argsort(np.argsort(-weight))[:, :11] < 16).sum(axis=1)

    def answered(keep, tokens):
        """How many of each person's eleven answers are right, told and after other text."""
        method = retention.Method(neighbours=tokens, keep=keep)
        model, memory = retention.written_so(made_up, method)
        rule = model.config.fast_weight.rule
        for layers in (told, other):
            memory = retention_facts.write_facts(model, memory, layers)
            found = jax.vmap(lambda *x: rule.read(*x)[0])(memory[layer], signals.query[:, 0])
            right = np.isclose(found[:, :11], signals.value[:, 0, 1:12], atol=1e-6).all(axis=-1)
            yield right.sum(axis=1).tolist()

    assert list(answered("last", 64)) == [[11, 11], [11, 11]]
    assert list(answered("strongest", 16)) == [[11, 11], strongest.tolist()]
    assert strongest.min() > 5
    assert strongest.max() < 11


def test_a_memory_that_is_written_at_once_is_told_whole_texts(made_up):
    """As the model's own pass over each text without the other's padding."""
    made_up, _ = made_up
    config = made_up.experiment.model
    memory = dataclasses.replace(config.fast_weight, rule=SDM.tiny())
    model = LanguageModel(dataclasses.replace(config, fast_weight=memory), rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(0), groups=2)
    texts = [np.arange(length, dtype=np.int32) for length in (7, 12)]
    told = memory
    for _ in range(2):
        read = retention_facts.read_to_write(model, memory, 12, texts)
        told = retention_facts.write_facts(model, told, read)
    for row, text in enumerate(texts):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], memory)
        for _ in range(2):
            alone = model.hidden(jnp.asarray(text[None]), alone).memory
        for found, expected in zip(jax.tree.leaves(told), jax.tree.leaves(alone), strict=True):
            assert np.abs(expected).max() > 0
            np.testing.assert_allclose(found[row], expected[0], rtol=1e-4, atol=1e-7)


def test_another_memory_has_the_plain_write_alone(made_up):
    made_up, _ = made_up
    config = made_up.experiment.model
    memory = dataclasses.replace(config.fast_weight, rule=SDM.tiny())
    config = dataclasses.replace(config, fast_weight=memory)
    state = init_state(config, memory=made_up.experiment.training.memory, optimizer=None, seed=0)
    of_sdm = made_up._replace(graphdef=model_graph(config), params=state.params)
    assert retention.written_so(of_sdm, retention.METHODS["plain"])[1] is made_up.memory
    with pytest.raises(ValueError, match="ask SDM for plain"):
        retention.written_so(of_sdm, retention.METHODS["keys still"])


def test_orders_hold_every_domain_once_and_end_differently():
    orders = retention_domains.orders(retention.DOMAINS)
    assert all(sorted(order) == sorted(retention.DOMAINS) for order in orders.values())
    assert len({order[-1] for order in orders.values()}) == len(orders)


def test_an_unread_domain_changes_by_what_reading_others_gives(made_up):
    made_up, texts = made_up
    one, two, three = read_domains(
        [f"{name}={texts / name}" for name in DOMAINS], made_up.experiment.data
    )
    letter = {tuple(x.evaluate.rows[0]["tokens"][:4]): x.name for x in (one, two, three)}
    found = retention_domains.changes_by_domain(
        (),
        [one, three],
        [two],
        # Each domain lowers every loss by 0.25, and that of its own rows by 1 more.
        read=lambda state, rows: (*state, letter[tuple(rows[0][0][:4])]),
        losses=lambda state, batch: np.full(
            len(batch), 4 - 0.25 * len(state) - (letter[tuple(batch[0][:4])] in state)
        ),
        groups=2,
        batches=1,
        eval_batches=1,
    )
    assert found["domains"] == ["one", "three"]
    assert [x[0] for x in found["own"]] == [-1.25, -1.5]
    assert [x[0] for x in found["end"]] == [-1.5, -1.5]
    assert found["unread"] == ["two"]
    assert found["unread_changes"] == [[[-0.25] * 3, [-0.5] * 3]]


def facts_line(run, method, exact, right):
    """Made-up answers: `right` of each person's two at the moments told, text_3 and facts_4."""
    moments = ("told_1", "told", "text_1", "text_3", "facts_4", "new_1", "new")
    counts: dict[str, list[int]] = {name: [0, 0] for name in moments}
    counts |= zip(("told", "text_3", "facts_4"), right, strict=True)
    facts = {
        name: {"exact": share, "right": counts[name], "questions": 4}
        for name, share in zip(moments, exact, strict=True)
    }
    line = {"measure": "facts", "run": run, "method": method, "facts": facts}
    return {**line, "settings": {"readings": 2}}


def test_the_facts_table_compares_each_run_with_its_own_plain_write():
    lines = [
        facts_line("a", "plain", (0.5, 1.0, 0.8, 0.5, 0.0, 0.5, 1.0), ([2, 2], [1, 1], [0, 0])),
        facts_line("a", "still", (0.4, 1.0, 0.8, 0.75, 0.0, 0.75, 1.0), ([2, 2], [2, 1], [0, 0])),
        facts_line("b", "plain", (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5), ([1, 1], [1, 1], [1, 1])),
        facts_line("b", "still", (0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5), ([1, 1], [1, 0], [1, 1])),
    ]
    found = columns(retention_tables.facts_table(lines))
    assert found["told once"] == ["0.50", "0.45 (1 of 2)"]
    assert found["after 3 texts"] == ["0.50", "0.50 (1 of 2)"]
    assert found["new facts, told once"] == ["0.50", "0.62 (2 of 2)"]
    found = columns(retention_tables.forgetting_table(lines))
    # Run a loses half as much as plain, run b a quarter where plain loses nothing.
    assert found["lost: after 3 texts"] == ["0.25", "0.25 (1 of 2)"]
    assert found["lost: after 4 haystacks with other facts"] == ["0.50", "0.50 (1 of 2)"]
    # Of four people one keeps half more and one half less: 0 on average, and the interval is wide.
    assert found["minus plain"][1].startswith("0.00 [")


def columns(table):
    """The cells below each head; of two with one name, the last."""
    head, _, *rows = ([cell.strip() for cell in x.split("|")[1:-1]] for x in table.splitlines())
    return {name: of for name, *of in zip(head, *rows, strict=True)}


def domains_line(run, order, method, adaptation, forgetting, batches=2):
    change = {"adaptation": [adaptation, 0, 0], "forgetting_mean": [forgetting, 0, 0]}
    names = {"measure": "domains", "run": run, "order": order, "method": method}
    return {**names, "batches": batches, "change": {**change, "bytes": [64_000 * batches]}}


def test_the_domains_table_takes_the_same_order_of_the_plain_write():
    lines = [
        domains_line("a", "given", "plain", -0.01, 0.004),
        domains_line("a", "mixed", "plain", -0.03, 0.002),
        domains_line("a", "mixed", "still", -0.04, 0.001),
        domains_line("b", "mixed", "plain", -0.01, 0.003),
        domains_line("a", "mixed", "plain", -0.05, 0.005, batches=4),
    ]
    *_, given, plain, still, over, longer = retention_tables.domains_table(lines).splitlines()
    assert given == "| plain | given | 128 kB | 1 | -0.0100 |  | 0.0040 |  |"
    assert plain.startswith("| plain | mixed | 128 kB | 2 | -0.0200 [-0.1471, 0.1071] |  |")
    numbers = "-0.0400 (1 of 1) | -0.0100 | 0.0010 (1 of 1) | -0.0010"
    assert still == f"| still | mixed | 128 kB | 1 | {numbers} |"
    # The other write has not read all orders of the plain one, so it has no mean.
    assert over == "| plain | over orders | 128 kB | 1 | -0.0200 |  | 0.0030 |  |"
    assert longer == "| plain | mixed | 256 kB | 1 | -0.0500 |  | 0.0050 |  |"


def test_the_domains_table_counts_runs_that_gain_as_much_and_lose_at_most_half():
    lines = [
        domains_line("a", "given", "plain", -0.02, 0.004),
        domains_line("a", "mixed", "plain", -0.04, 0.002),
        domains_line("a", "given", "still", -0.03, 0.002),
        domains_line("a", "mixed", "still", -0.02, 0.002),
    ]
    *_, given, _, mixed, _, over = retention_tables.domains_table(lines).splitlines()
    given, mixed, over = (line.partition("kB | 1 | ")[2] for line in (given, mixed, over))
    assert given == "-0.0300 (1 of 1) | -0.0100 | 0.0020 (1 of 1) | -0.0020 |"
    assert mixed == "-0.0200 (0 of 1) | 0.0200 | 0.0020 (0 of 1) | 0.0000 |"
    assert over == "-0.0250 (0 of 1) | 0.0050 | 0.0020 (0 of 1) | -0.0010 |"


def test_each_domain_stands_beside_that_of_the_plain_write():
    def line(run, method, own, end):
        change = {"domains": ["a", "b"], "own": [[own, 0, 0], [-0.5, 0, 0]]}
        change |= {"end": [[end, 0, 0], [-0.5, 0, 0]], "forgetting": [[end - own, 0, 0]]}
        about = {"measure": "domains", "order": "given", "batches": 2, "change": change}
        return about | {"run": run, "method": method}

    lines = [line("x", "still", -0.25, -0.125), line("x", "plain", -0.25, 0.0)]
    lines.append(line("y", "plain", -0.75, 0.0))
    plain, still, *last = retention_tables.beside_plain_table(lines).splitlines()[2:]
    assert plain.startswith("| a | given | plain | 2 | -0.5000 [")
    assert plain.endswith("] | 0.0000 [0.0000, 0.0000] | 0.5000 [-2.6766, 3.6766] |  |")
    assert still == "| a | given | still | 1 | -0.2500 | -0.1250 | 0.1250 | -0.1250 |"
    assert last[1] == "| b | given | still | 1 | -0.5000 | -0.5000 |  |  |"


def test_tables_without_a_plain_write_say_what_to_measure(tmp_path):
    out = tmp_path / "lines.jsonl"
    about = {"measure": "domains", "run": "one", "order": "given", "batches": 2}
    lines = [about | {"method": "keys still"}, about | {"run": "two", "method": "plain"}]
    lines.append({"measure": "cost", "run": "three", "order": None, "method": "keys still"})
    out.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SystemExit, match=r"\['one domains given 2'\] lack .* --methods plain"):
        run("lab.study.retention", "--tables", "--out", out)


@pytest.mark.parametrize("option", ["methods", "orders", "unread"])
def test_an_unknown_name_is_refused_before_a_run_is_loaded(option, tmp_path):
    with pytest.raises(SystemExit, match=rf"--{option}: \['none'\] are none of \("):
        run("lab.study.retention", f"--{option}", "none", "--out", tmp_path / "lines.jsonl")


def test_runs_are_measured_with_each_write_once(made_up, tmp_path, monkeypatch, capsys):
    made_up, texts = made_up
    loaded = []
    monkeypatch.setattr(retention, "load_run", lambda path: loaded.append(path) or made_up)
    monkeypatch.setattr(retention, "DOMAINS", DOMAINS)
    sparing, out = "keys still, relocation 1", tmp_path / "lines.jsonl"
    options = (
        *("--runs", "runs/made_up", "--methods", "plain", sparing, "--data", texts, "--out", out),
        *("--measures", "facts", "domains", "text", "cost", "--text", texts / "books.jsonl"),
        *("--turns", 1, "--orders", "backwards", "--batches", 2),
        *("--unread", "two"),
        *("--eval-batches", 2, "--people", 2, "--words", 8, "--readings", 2, "--pieces", 1, 2),
        *("--other-facts", 2, "--length", 20, "--seed", 1, "--image", tmp_path / "picture.png"),
    )
    for _ in range(2):
        run("lab.study.retention", *options)
    assert len(loaded) == 2
    run("lab.study.retention", *options, "--tables")
    assert len(loaded) == 2
    lines = result_lines(out)
    assert [(x["method"], x["measure"], x["order"]) for x in lines] == [
        (method, *measure)
        for method in ("plain", sparing)
        for measure in (
            *(("facts", None), ("domains", "backwards without two"), ("text", None)),
            ("cost", None),
        )
    ]
    assert lines[3]["history_bytes"] == 0 < lines[7]["history_bytes"]
    for text in (lines[2]["text"], lines[6]["text"]):
        assert text["labels"] == [540, 480]
        assert all(5.0 < loss < 6.0 for loss in text["losses"])
    assert lines[2]["text"] != lines[6]["text"]
    for facts in (lines[0]["facts"], lines[4]["facts"]):
        moments = ["told_1", "told", "text_1", "text_2", "new_1", "new", "facts_2"]
        assert list(facts) == moments
        assert all(answers["questions"] == 10 for answers in facts.values())
        assert all(len(answers["right"]) == 2 for answers in facts.values())
    change = lines[1]["change"]
    assert change["domains"] == ["three", "one"]
    groups = jax.tree.leaves(made_up.memory)[0].shape[0]
    assert change["bytes"] == [2 * groups * 16] * 2
    assert len(change["own"]) == 2
    assert len(change["forgetting"]) == 1
    assert change["unread"] == ["two"]
    ((first, second),) = change["unread_changes"]
    assert 0 != first[0] != second[0] != 0
    gain, end, lost = (change[name][0][0] for name in ("own", "end", "forgetting"))
    assert gain != 0
    assert abs(end - gain - lost) < 2e-6
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert f"| {sparing} |" in shown
    own, unread = (np.mean([x[0] for x in of]) for of in (change["own"], (first, second)))
    assert f"| plain | made_up | backwards without two | two | {unread:.4f} | {own:.4f} |" in shown
