"""Exit code 0 means that `verify` says equal, that the way back gives the same bits, and that nothing else changed."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings

from slime_convert.cli import main
from support.family_models import same_bits, tree, weights_of
from support.generated_models import models, write

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(UNHURRIED, max_examples=20)
@given(models())
def test_there_and_back(tmp_path_factory, model):
    check(tmp_path_factory, *model)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(UNHURRIED, max_examples=300)
@given(models())
def test_there_and_back_of_many(tmp_path_factory, model):
    check(tmp_path_factory, *model)


def check(tmp_path_factory, config, how):
    root = tmp_path_factory.mktemp("generated")
    given_ = write(root / "hf", config, how)
    before = tree(root)
    words = ["--hf-checkpoint", root / "hf", "--save", root / "new" / "td", "--quiet"]
    refused = how["extra"] == "model.extra.weight"
    code = main(list(map(str, ["hf-to-torch-dist", *words, "--make-vocab-size-divisible-by", 16])))
    if code:
        assert code == 2 and tree(root) == before
        assert refused or how["other_types"] or how["tied_output"] == "other", "refused without a reason"
    else:
        assert not refused
        after = tree(root)
        assert {name: after[name] for name in before} == before
        assert main(["verify", str(root / "hf"), str(root / "new" / "td"), "--quiet"]) == 0
        words = ["--input-dir", root / "new" / "td", "--origin-hf-dir", root / "hf", "--output-dir", root / "back"]
        assert main(list(map(str, ["torch-dist-to-hf", *words, "--quiet"]))) == 0
        assert main(["verify", str(root / "hf"), str(root / "back"), "--quiet"]) == 0
        back = weights_of(root / "back")
        tied_output = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
        held = {name for name in given_ if not name.endswith("inv_freq")} - tied_output
        assert back.keys() == held
        assert all(same_bits(back[name], given_[name]) for name in held)
    shutil.rmtree(root)
