import pytest

from slime_convert.errors import ConvertError
from slime_megatron.errors import TrainerCheckpointError, reading_files


def test_an_error_of_the_files_is_the_trainers():
    with pytest.raises(TrainerCheckpointError, match="cannot load it: cut off"), reading_files("cannot load it: "):
        raise ConvertError("cut off")
    with pytest.raises(ValueError, match="another"), reading_files():
        raise ValueError("another")
