import pytest

from slime_core.errors import ConfigError
from slime_launch.flags import parse_train
from slime_launch.overrides import read_overrides

PPO = {"--advantage-estimator": "ppo"}


def overrides_of(settings):
    path, has_critic = settings.run.megatron_config_path, settings.kind.has_critic
    return read_overrides(path, settings.megatron, has_critic=has_critic)


@pytest.fixture
def read(flags, to_words, tmp_path):
    def reading(text, more=PPO):
        (tmp_path / "roles.yaml").write_text(text)
        settings = parse_train([*to_words(flags | more), "--megatron-config-path", str(tmp_path / "roles.yaml")])
        return overrides_of(settings)

    return reading


def test_settings_have_the_types_of_their_flags(read, flags, to_words):
    text = """
    megatron:
      - {name: mine, role: actor, overrides: {lr: 1e-5, use_distributed_optimizer: true}}
      - role: critic
        overrides: {clip_grad: 2, lr_warmup_iters: 3, lr_decay_iters: null, freeze_params_name_list: [embedding]}
    """
    assert read(text) == {
        "actor": {"lr": 1e-5, "use_distributed_optimizer": True},
        "critic": {
            "clip_grad": 2.0, "lr_warmup_iters": 3, "lr_decay_iters": None, "freeze_params_name_list": ("embedding",),
        },
    }  # fmt: skip
    assert overrides_of(parse_train(to_words(flags))) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"must hold a list under `megatron`, and nothing else; write `megatron: \[{role: critic,"),
        ("megatron: [{overrides: {}}]", "must have a role and may have a name and overrides"),
        ("megatron: [{role: critic, gpus: 3}]", "must have a role and may have a name and overrides"),
        ("megatron: [{role: teacher}]", "the role teacher is unknown; allowed: actor, critic"),
        ("megatron: [{role: actor}, {role: actor}]", "the role actor is there twice"),
        (
            "megatron: [{role: actor, overrides: {learning_rate: 1}}]",
            "unknown setting learning_rate of the actor; give",
        ),
        ("megatron: [{role: actor, overrides: {clip_grads: 1}}]", "clip_grads of the actor; did you mean clip_grad"),
        ("megatron: [{role: actor, overrides: {lr: high}}]", "lr 'high' must be a number"),
        ("megatron: [{role: actor, overrides: {lr_warmup_iters: 1.5}}]", "lr_warmup_iters 1.5 must be a whole number"),
        ("megatron: [{role: actor, overrides: {bf16: 1}}]", "bf16 1 must be true or false"),
        ("megatron: [{role: actor, overrides: {lr: -1}}]", "--lr -1.0 must be 0 or more"),
        ("megatron: [{role: actor, overrides: {tensor_model_parallel_size: 2}}]", "is the same for all roles"),
        ("megatron: [{role: actor, overrides: {micro_batch_size: 2}}]", "is the same for all roles; give it as a flag"),
    ],
)
def test_a_file_that_cannot_be_used(read, text, message):
    with pytest.raises(ConfigError, match=f"--megatron-config-path .*roles.yaml.*{message}"):
        read(text)


def test_a_critic_that_is_not_there(read):
    with pytest.raises(ConfigError, match="this run has no critic; add --advantage-estimator ppo"):
        read("megatron: [{role: critic}]", {})
