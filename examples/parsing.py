"""Section 6.3: constituency parsing as translation, from sentences to their trees.

    python examples/parsing.py                                    a made grammar, some minutes
    python examples/parsing.py --train wsj-train.mrg --dev wsj-dev.mrg --vocabulary-size 16000 \
        --steps 100000 --set num_layers=4 --set hidden_dim=1024 --set num_heads=16 \
        --set dropout=0.3                                         trees of the Penn Treebank

A tree is written as a line of brackets, "(S (NP XX XX )NP (VP XX )VP )S" (Vinyals et al., 2015):
the words, and their parts of speech, are left out, for they are in the source. So a sentence and
its tree are a pair like any other, and training and search are those of a translator.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from keras_aiayn import Translator
from keras_aiayn.data import corpus, prepared
from keras_aiayn.data.tokenizer import SentencePieceTokenizer
from keras_aiayn.training import train

# ("NP", ("DT", "the"), ("NN", "dog")): a label and what is below, or a part of speech and a word.
Tree = tuple[Any, ...]

WORD = "XX"  # in the place of every word, and of every part of speech
OUTER = "TOP"
OUTERMOST = {"", OUTER, "ROOT", "S1"}  # what the outermost bracket of a file may be called
SEARCH = {"beam_size": 21, "length_penalty": 0.3, "max_extra_length": 300}  # the paper's
TRAINED, HELD_OUT = 24_000, 300  # of the made grammar
AVERAGED = 5  # checkpoints, as in section 6.1
SETTINGS = [
    "num_layers=2",
    "dropout=0",  # of the made grammar there is more than is seen twice
    "tokens_per_batch=1024",
    "warmup_steps=300",
    "learning_rate_scale=0.5",
    "max_shapes=4",
    "evaluate_every=500",
    "checkpoint_every=30",
    f"keep_last={AVERAGED}",
]


# Trees in files


def read_trees(lines: Iterable[str], name: str = "the text") -> list[Tree]:
    """Reads trees in brackets as the Penn Treebank writes them, and tidies each.

    Args:
        lines: of a file; a tree may take several, and a line hold several.
        name: of the file, for errors.

    Returns:
        The trees, as `tidy` leaves them.

    Raises:
        ValueError: where brackets do not match, a word stands alone, or a tree has no words.
    """
    trees: list[Tree] = []
    open_: list[list[Any]] = []
    for number, line in enumerate(lines, start=1):
        for token in re.findall(r"[()]|[^\s()]+", line):
            if token == "(":
                open_.append([])
            elif token != ")" and open_:
                open_[-1].append(token)
            elif token == ")" and open_:
                node = _node(open_.pop(), f"{name}, line {number}")
                if open_:
                    open_[-1].append(node)
                else:
                    trees.append(_outermost(node, f"{name}, line {number}"))
            else:
                raise ValueError(f"{name}, line {number}: {token!r} stands outside of all brackets")
    if open_:
        raise ValueError(f"{name} ends within a tree: a bracket is missing")
    if not trees:
        raise ValueError(f"there are no trees in {name}")
    return trees


def _node(parts: list[Any], place: str) -> Tree:
    """What stood between two brackets, as a tree."""
    if parts and not isinstance(parts[0], str):
        parts = ["", *parts]  # the outermost bracket has no label
    inner = [isinstance(part, tuple) for part in parts[1:]]
    if not inner or not (all(inner) or len(parts) == 2):
        raise ValueError(
            f"{place}: a bracket holds a label and brackets, or a part of speech and a word. "
            f"Received: ({' '.join(p if isinstance(p, str) else '(...)' for p in parts)})"
        )
    return tuple(parts)


def _outermost(node: Tree, place: str) -> Tree:
    tree = tidy(node)
    if tree is None:
        raise ValueError(f"{place}: a tree without words")
    if not is_leaf(tree) and tree[0] in OUTERMOST:
        return tree[1] if len(tree) == 2 else (OUTER, *tree[1:])
    return tree


def tidy(tree: Tree) -> Tree | None:
    """Takes out traces (-NONE-) and the brackets that they leave empty; NP-SBJ-1 becomes NP.

    Returns:
        The tree, or None where nothing is left of it.
    """
    if is_leaf(tree):
        return None if tree[0] == "-NONE-" else tree
    kept = [child for child in map(tidy, tree[1:]) if child is not None]
    return (re.sub(r"(?<=.)[-=].*", "", tree[0]), *kept) if kept else None


def is_leaf(tree: Tree) -> bool:
    """Whether a tree is a part of speech and a word."""
    return len(tree) == 2 and isinstance(tree[1], str)


def leaves(tree: Tree) -> Iterator[tuple[str, str]]:
    """The (part of speech, word) of a tree, from left to right."""
    if is_leaf(tree):
        yield tree  # type: ignore[misc]
    else:
        for child in tree[1:]:
            yield from leaves(child)


def words(tree: Tree) -> list[str]:
    """The words of a tree."""
    return [word for _, word in leaves(tree)]


def written(tree: Tree) -> str:
    """A tree in brackets, on one line."""
    return f"({tree[0]} {tree[1] if is_leaf(tree) else ' '.join(map(written, tree[1:]))})"


# Trees as lines, and lines as trees


def linearize(tree: Tree) -> str:
    """A tree as the line that the decoder writes: brackets with labels, XX for each word."""
    if is_leaf(tree):
        return WORD
    label, *children = tree
    return " ".join([f"({label}", *map(linearize, children), f"){label}"])


def delinearize(line: str, sentence: Sequence[str]) -> Tree:
    """A tree of exactly these words, whatever the line is.

    A bracket that closes nothing is left out, and one that closes an outer bracket closes those
    within it. Brackets that stay open end with the line, brackets without words go. Of too many
    words the last are left out; words that are missing are put at the end of the sentence.

    Args:
        line: of brackets and XX, what `linearize` gives where nothing is wrong.
        sentence: the words, at least one.

    Returns:
        The tree, with XX for every part of speech.
    """
    root: list[Any] = [OUTER]
    open_ = [root]
    waiting = [(WORD, word) for word in reversed(sentence)]
    for token in line.split():
        label = token[1:]
        if token.startswith("("):
            node = [label]
            open_[-1].append(node)
            open_.append(node)
        elif token.startswith(")"):
            inside = [node[0] for node in open_[:0:-1]]  # from the innermost, without the root
            if label in inside:
                del open_[len(open_) - 1 - inside.index(label) :]
        elif waiting:
            open_[-1].append(waiting.pop())
    alone = len(root) == 2 and isinstance(root[1], list)
    (root[1] if alone else root).extend(reversed(waiting))
    tree = _frozen(root)
    return tree[1] if len(tree) == 2 else tree


def _frozen(node: Any) -> Tree | None:
    """Lists as tuples, without those that hold no word."""
    if isinstance(node, tuple):
        return node
    kept = [child for child in map(_frozen, node[1:]) if child is not None]
    return (node[0], *kept) if kept else None


# The measure

PUNCTUATION = {",", ":", "``", "''", "."}  # parts of speech
SAME = {"PRT": "ADVP"}


@dataclass(frozen=True)
class Scores:
    """What evalb counts, over all sentences.

    Attributes:
        matched: brackets of both trees.
        right: brackets of the right trees.
        given: brackets of the given ones.
        complete: sentences of which all brackets match.
        sentences: that count.
        skipped: sentences whose two trees have not the same number of words.
    """

    matched: int
    right: int
    given: int
    complete: int
    sentences: int
    skipped: int

    @property
    def recall(self) -> float:
        """Percent of the right brackets that are given."""
        return 100 * self.matched / max(1, self.right)

    @property
    def precision(self) -> float:
        """Percent of the given brackets that are right."""
        return 100 * self.matched / max(1, self.given)

    @property
    def f1(self) -> float:
        """The harmonic mean of recall and precision."""
        return 200 * self.matched / max(1, self.right + self.given)

    @property
    def complete_match(self) -> float:
        """Percent of the sentences."""
        return 100 * self.complete / max(1, self.sentences)


def score(given: Iterable[Tree], right: Iterable[Tree]) -> Scores:
    """Compares trees by the rules of evalb with COLLINS.prm.

    A bracket is a label and the words it spans. Those of TOP do not count, words of punctuation
    are taken out first with the brackets that they leave empty, ADVP and PRT are one label, and
    of brackets that are there twice each counts.

    Unlike evalb, what is punctuation is what the right tree says, in both trees: ours have no
    parts of speech. All skipped sentences are counted (evalb gives up at the eleventh), and
    crossing brackets and the sentences of at most 40 words have no figures of their own.

    Args:
        given: the trees to judge.
        right: as many.
    """
    matched = in_right = in_given = complete = sentences = skipped = 0
    for ours, theirs in zip(given, right, strict=True):
        counted = [tag not in PUNCTUATION for tag, _ in leaves(theirs)]
        if len(words(ours)) != len(counted):
            skipped += 1
            continue
        one, other = brackets(ours, counted), brackets(theirs, counted)
        sentences += 1
        matched += (one & other).total()
        in_given += one.total()
        in_right += other.total()
        complete += one == other
    return Scores(matched, in_right, in_given, complete, sentences, skipped)


def brackets(tree: Tree, counted: Sequence[bool]) -> Counter[tuple[str, int, int]]:
    """The (label, first word, last word + 1) of a tree, over the words that count."""
    found: Counter[tuple[str, int, int]] = Counter()
    remaining = iter(counted)
    place = 0

    def visit(node: Tree) -> None:
        nonlocal place
        if is_leaf(node):
            place += next(remaining)
            return
        first = place
        for child in node[1:]:
            visit(child)
        if place > first and node[0] != OUTER:
            found[SAME.get(node[0], node[0]), first, place] += 1

    visit(tree)
    return found


# A made grammar

# Weight, then what a symbol becomes, as in a treebank: with function tags and traces, which
# reading takes out again. What has no rule is a part of speech; behind the slash is its list of
# words. "with" a tool says how something was done, "with" anything else what someone looked like.
GRAMMAR = {
    "TOP": "8 S-MAIN | 2 S-AND",
    "S-MAIN": "6 NP-SBJ VP ./end | 2 PP-LOC ,/comma NP-SBJ VP ./end"
    " | 1 SBAR-ADV ,/comma NP-SBJ VP ./end | 1 NP-SBJ ADVP VP ./end",
    "S-AND": "1 S CC/and S ./end | 1 S ,/comma CC/and S ./end",
    "S": "1 NP-SBJ VP",
    "NP-SBJ": "3 DT/the NN/person | 2 DT/the JJ/kind NN/person | 2 NNP/name | 1 PRP/he"
    " | 1 NP-PERSON PP-LOOK | 1 NP-PERSON SBAR-WHO | 1 NP-PERSON CC/and NP-PERSON",
    "NP-OBJ": "3 DT/the NN/thing | 2 DT/the JJ/kind NN/thing | 2 DT/the NN/person | 1 NNS/things"
    " | 2 NP-PERSON PP-LOOK | 1 NP-PERSON SBAR-WHO | 1 NP-THING PP-OF | 1 NP-THING PP-LOC"
    " | 1 NP-THING SBAR-THAT | 1 NP-THING CC/and NP-THING",
    "NP-PERSON": "3 DT/the NN/person | 1 DT/the JJ/kind NN/person | 1 NNP/name",
    "NP-THING": "3 DT/the NN/thing | 1 DT/the JJ/kind NN/thing | 1 CD/number NNS/things",
    "NP-TOOL": "3 DT/the NN/tool | 1 DT/the JJ/kind NN/tool",
    "NP-LOOK": "3 DT/the NN/look | 1 JJ/kind NNS/looks",
    "NP-PLACE": "4 DT/the NN/place | 1 NNP/city | 1 NP-SPOT PP-OF",
    "NP-SPOT": "1 DT/the NN/place",
    "VP": "4 VBD/saw NP-OBJ | 3 VBD/saw NP-OBJ PP-MNR | 2 VBD/slept | 1 VBD/slept PP-LOC"
    " | 1 VBD/slept ADVP | 1 VBD/gave NP-OBJ PP-TO | 1 VBD/said SBAR-SAID | 1 VBD/put PRT NP-OBJ"
    " | 1 VBD/was ADJP-PRD | 1 VBD/wanted S-TO | 1 VP CC/and VP",
    "S-TO": "1 NP-TRACE VP-TO",
    "VP-TO": "1 TO/to VP-SEE",
    "VP-SEE": "2 VB/see NP-OBJ | 1 VB/see NP-OBJ PP-MNR | 1 VB/sleep PP-LOC",
    "SBAR-SAID": "2 IN/that S | 1 -NONE-/zero S",
    "SBAR-ADV": "1 IN/when S",
    "SBAR-WHO": "1 WHNP-WHO S-GAP",
    "WHNP-WHO": "1 WP/who",
    "S-GAP": "1 NP-TRACE VP",
    "NP-TRACE": "1 -NONE-/trace",
    "SBAR-THAT": "2 WHNP-THAT S-OF | 1 WHNP-ZERO S-OF",
    "WHNP-THAT": "1 WDT/that",
    "WHNP-ZERO": "1 -NONE-/zero",
    "S-OF": "1 NP-SBJ VP-OF",
    "VP-OF": "1 VBD/saw NP-TRACE",
    "PP-LOOK": "1 IN/with NP-LOOK",
    "PP-MNR": "1 IN/with NP-TOOL",
    "PP-OF": "1 IN/of NP-PERSON",
    "PP-TO": "1 TO/to NP-PERSON",
    "PP-LOC": "1 IN/in NP-PLACE",
    "PRT": "1 RP/up",
    "ADVP": "1 RB/often | 1 RB/very RB/often",
    "ADJP-PRD": "2 JJ/kind | 1 RB/very JJ/kind | 1 JJ/kind CC/and JJ/kind",
}  # fmt: skip
WORDS = {
    "the": "the a this that every", "and": "and or", "comma": ",", "end": ".", "he": "he she they",
    "trace": "*T*-1", "zero": "0", "to": "to", "that": "that which", "who": "who",
    "when": "when because although before", "with": "with", "of": "of from", "up": "up away down",
    "in": "in near behind under at", "very": "very quite rather", "was": "was seemed became",
    "number": "two three seven ten 20 45", "name": "Anna Boris Clara David Emma Felix Greta Hugo",
    "city": "Paris Oslo Lima Cairo Delhi",
    "person": "man woman girl boy doctor teacher pilot farmer king queen singer thief judge nurse",
    "thing": "book ball letter car bridge picture table boat song house horse coat lamp stone",
    "things": "books balls letters cars pictures boats songs houses horses lamps stones",
    "tool": "telescope camera hammer knife spoon rope key brush ladder net",
    "look": "beard hat scarf smile moustache tattoo wig limp", "looks": "eyes shoes hands hair",
    "place": "park garden kitchen street river forest office station harbour tower",
    "kind": "old young tall happy green quiet strange small large famous cold clever",
    "often": "often slowly yesterday quietly again",
    "saw": "saw found watched painted moved kept cleaned touched",
    "see": "see find watch paint move clean", "slept": "slept laughed waited sang fell",
    "sleep": "sleep wait sing", "gave": "gave sent showed sold", "said": "said thought knew",
    "put": "put threw picked", "wanted": "wanted tried hoped",
}  # fmt: skip


def made_trees(count: int, seed: int, longest: int = 30) -> list[Tree]:
    """Trees of the made grammar, no two of them of the same sentence.

    Args:
        count: how many.
        seed: equal seeds give equal trees, in the same order.
        longest: the most words of a sentence.
    """
    generator = random.Random(seed)
    rules = {symbol: _rules(text) for symbol, text in GRAMMAR.items()}
    found: dict[str, Tree] = {}
    while len(found) < count:
        (tree,) = read_trees([_drawn("TOP", rules, generator)])
        sentence = words(tree)
        if len(sentence) <= longest:
            found[" ".join(sentence)] = tree
    return list(found.values())


def _rules(text: str) -> tuple[list[float], list[list[str]]]:
    """The weights of what a symbol becomes, and what that is."""
    split = [rule.split() for rule in text.split(" | ")]
    return [float(weight) for weight, *_ in split], [parts for _, *parts in split]


def _drawn(symbol: str, rules: dict[str, Any], generator: random.Random) -> str:
    """What a symbol becomes, in brackets."""
    if symbol not in rules:
        tag, _, kind = symbol.rpartition("/")
        return f"({tag} {generator.choice(WORDS[kind].split())})"
    weights, expansions = rules[symbol]
    (chosen,) = generator.choices(expansions, weights)
    return f"({symbol} {' '.join(_drawn(part, rules, generator) for part in chosen)})"


# The parser


def prepare(trees: Sequence[Tree], folder: Path, vocabulary_size: int) -> prepared.Prepared:
    """Writes sentences and their trees as aligned files, and prepares them like any pair.

    Brackets are one piece each; the subwords are those of the sentences.
    """
    lines = {
        "words": [" ".join(words(tree)) for tree in trees],
        "trees": [linearize(tree) for tree in trees],
    }
    for side, texts in lines.items():
        with corpus.whole_file(folder / f"train.{side}", "w") as stream:
            stream.writelines(text + "\n" for text in texts)
    symbols = sorted({token for line in lines["trees"] for token in line.split()})
    tokenizer = SentencePieceTokenizer.learn(lines["words"], vocabulary_size, symbols=symbols)
    tokenizer.save_assets(folder)
    return prepared.write(
        folder / "train.words",
        folder / "train.trees",
        None,
        None,
        folder / "prepared",
        tokenizer_from=folder / tokenizer.asset_name,
        max_length=1024,
        max_length_ratio=30,
    )


def parse(
    translator: Translator, sentences: Sequence[Sequence[str]], **settings: Any
) -> list[Tree]:
    """Parses sentences, each a list of words, by the paper's search.

    Args:
        translator: a trained one, from sentences to lines of brackets.
        sentences: the words of each.
        **settings: of `Translator.translate`, in the place of the paper's.
    """
    texts = [" ".join(sentence) for sentence in sentences]
    lines = translator.translate(texts, **SEARCH | settings)
    return [delinearize(line, one) for line, one in zip(lines, sentences, strict=True)]


def main(arguments: Sequence[str] | None = None) -> Scores:
    """Trains, parses, counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, help="trees in brackets; a made grammar by default")
    parser.add_argument("--dev", type=Path, help="trees to judge by, which are not trained on")
    parser.add_argument("--vocabulary-size", type=int, default=700)
    parser.add_argument("--steps", type=int, default=3_000, help="updates (default 3000)")
    parser.add_argument("--config", default="tiny", help="a row of Table 3, small or tiny")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE of the model or of"
                        " its training, such as num_layers=4")  # fmt: skip
    parser.add_argument("--beam", type=int, default=SEARCH["beam_size"])
    parser.add_argument("--output", type=Path, default=Path("parser.keras"))
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        return run(options, console)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def run(options: argparse.Namespace, console: Console) -> Scores:
    """What the options ask for."""
    if (options.train is None) != (options.dev is None):
        raise ValueError("--train and --dev are given together, or neither")
    corpus.check_writable(options.output)
    if options.train is None:
        made = made_trees(TRAINED + HELD_OUT, seed=1)
        trained, held_out = made[HELD_OUT:], made[:HELD_OUT]
    else:
        trained, held_out = (
            read_trees(corpus.read_lines(path), str(path)) for path in (options.train, options.dev)
        )
    console.print(f"{len(trained):,} trees to train on, {len(held_out):,} held out")
    with tempfile.TemporaryDirectory() as folder:
        pairs = prepare(trained, Path(folder), options.vocabulary_size)
        settings = [*SETTINGS, f"steps={options.steps}", *options.set]
        configs = train.configure(pairs, options.config, settings)
        kept = -(-configs[1].steps // configs[1].checkpoint_every)
        average = min(AVERAGED, kept, configs[1].keep_last)
        run_folder = Path(folder) / "run"
        translator = train.run(pairs, run_folder, configs, average=average, console=console)
        shutil.copyfile(run_folder / "model.keras", options.output)

    found = parse(translator, [words(tree) for tree in held_out], beam_size=options.beam)
    scores = score(found, held_out)
    wrong = [i for i, tree in enumerate(found) if linearize(tree) != linearize(held_out[i])]
    for i in wrong[:3]:
        console.print(f"ours:  {written(found[i])}\nright: {written(held_out[i])}", markup=False)
    console.print(
        f"labelled recall {scores.recall:.2f}, precision {scores.precision:.2f}, "
        f"F1 {scores.f1:.2f}, complete match {scores.complete_match:.2f} %, "
        f"{scores.sentences} sentences\nthe parser is in {options.output}"
    )
    return scores


if __name__ == "__main__":
    main()
