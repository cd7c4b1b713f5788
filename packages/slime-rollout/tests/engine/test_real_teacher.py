"""A real SGLang server as the teacher, against transformers. T: tokens of prompt and response, V: vocabulary."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.types import Sample, Status, WeightUpdate
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.errors import TeacherError
from slime_rollout.rollout import RolloutManager
from slime_rollout.teacher import TeacherVocabulary, make_teacher
from slime_rollout.weights import TensorWeightChannel

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SAME = 1e-4


@pytest.fixture(scope="module")
def network(tiny_model):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def teacher_fleet(fleet, network):
    """The engines with the weights that the model's directory holds, whatever other tests have sent them."""
    channel = TensorWeightChannel(ChannelSpec(tuple(fleet.engine_urls)))
    channel.begin(WeightUpdate(version=0))
    channel.send(list(network.state_dict().items()))
    channel.end()
    channel.close()
    return fleet


@torch.no_grad()
def expected_log_probs(network, sample):
    logp_TV = network(torch.tensor([sample.tokens])).logits[0, :-1].double().log_softmax(-1)
    targets_T = torch.tensor(sample.tokens[1:])
    return logp_TV.gather(1, targets_T[:, None])[-sample.response_length :, 0]


def difference(values, others):
    return (torch.as_tensor(values, dtype=torch.float64) - torch.as_tensor(others, dtype=torch.float64)).abs().max()


def config(tiny_model, url, **more):
    return RolloutConfig.of(
        hf_checkpoint=tiny_model, prompt_data="x", rollout_batch_size=1, opd_type="sglang", rm_url=url, **more
    )


def random_sample(index, prompt, response, generator):
    tokens = torch.randint(0, 300, (prompt + response,), generator=generator).tolist()
    tokens[-1] = 299  # which SGLang calls 0
    return Sample(
        index=index, group_index=0, prompt="p", tokens=tokens, response_length=response, status=Status.COMPLETED
    )


@pytest.mark.parametrize("through", ["an engine", "the router"])
def test_log_probs_are_those_of_the_teachers_model(teacher_fleet, tiny_model, network, through):
    """Of any tokens, sampled by it or not; of prompts of one token, and of more tokens than one chunk of a prefill."""
    url = teacher_fleet.engine_urls[0] if through == "an engine" else teacher_fleet.router_url
    teacher = make_teacher(config(tiny_model, url))
    assert teacher._vocabulary == TeacherVocabulary(largest=299, shown_as_zero=299)
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 1), (1, 30), (40, 1), (7, 200), (20, 900), (600, 300)]
    samples = [random_sample(index, *shape, generator) for index, shape in enumerate(shapes)]

    async def ask():
        await asyncio.gather(*map(teacher, samples))

    asyncio.run(ask())
    for sample in samples:
        sample.validate()
    worst = max(difference(sample.teacher_log_probs, expected_log_probs(network, sample)) for sample in samples)
    print(f"largest difference of the teacher's log-probs from transformers' through {through}: {worst:.1e}")
    assert worst < SAME


def test_a_student_that_is_its_own_teacher_reads_its_own_log_probs(teacher_fleet, tiny_model, write_rows):
    rows = write_rows([{"prompt": f"{number} + 1 ="} for number in range(4)])
    settings = config(tiny_model, teacher_fleet.engine_urls[0], n_samples_per_prompt=4, rollout_max_response_len=60)
    settings = settings.changed(prompt_data=rows, rollout_batch_size=4)
    batch = RolloutManager(settings, router_url=teacher_fleet.router_url, run_seed=2).generate(0)
    worst = max(difference(sample.teacher_log_probs, sample.rollout_log_probs) for sample in batch.samples)
    tokens = sum(sample.response_length for sample in batch.samples)
    print(f"largest difference between what the student sampled with and what the teacher reads: {worst:.1e}")
    assert tokens > 300
    assert worst < SAME


def test_a_sample_that_is_too_long_for_the_teacher(teacher_fleet, tiny_model, caplog):
    teacher = make_teacher(config(tiny_model, teacher_fleet.engine_urls[0], rollout_max_response_len=8185))
    assert "samples may get 8186 tokens long" in caplog.text and "takes 8185" in caplog.text
    generator = torch.Generator().manual_seed(4)
    fits, too_long = (random_sample(index, 17, length, generator) for index, length in enumerate((8168, 8169)))
    asyncio.run(teacher(fits))
    assert len(fits.teacher_log_probs) == 8168
    with pytest.raises(TeacherError, match=r"sample 1 of 8186 tokens: .* refused it \(HTTP 400: .*8186 tokens"):
        asyncio.run(teacher(too_long))
