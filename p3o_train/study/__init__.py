"""``p3o study``: P3O and the losses that it is compared with on a small task, as rollouts drift from the policy."""
