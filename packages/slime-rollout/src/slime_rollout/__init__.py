"""Prompts in, scored and versioned samples out.

`slime_rollout.rollout.RolloutManager` puts the parts together: `data` reads prompts, `generate` samples from SGLang,
`rewards` scores, `store` keeps finished rollouts. Importing this imports none of them.
"""
