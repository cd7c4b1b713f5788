"""Checksums and byte deltas of tensors, for both ends of a weight sync. Importing this imports torch.

Everything here looks at the bits of a tensor and never at its values: NaN equals itself if its bits do, and 0.0 is not
-0.0. Bits are taken as they lie in the memory of a little-endian machine, in row-major order whatever the strides.
"""

from slime_core.integrity.checksum import (
    CHECKSUM_ALGORITHM,
    ChecksumStream,
    combined_checksum,
    tensor_checksum,
    verify_checksums,
)
from slime_core.integrity.delta import DeltaInfo, apply_delta, apply_delta_, delta_info, encode_delta

__all__ = [
    "CHECKSUM_ALGORITHM",
    "ChecksumStream",
    "DeltaInfo",
    "apply_delta",
    "apply_delta_",
    "combined_checksum",
    "delta_info",
    "encode_delta",
    "tensor_checksum",
    "verify_checksums",
]
