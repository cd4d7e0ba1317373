"""flash-attn-4 reads its target when it is imported: a Hopper GPU, which nobody needs to have."""

import os

os.environ |= {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
