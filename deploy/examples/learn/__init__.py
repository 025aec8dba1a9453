"""The proof that the algorithms learn: each of them, from one seed policy, on a task of a minute or two."""
