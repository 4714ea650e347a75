"""Paged KV: bookkeeping without torch (`pages`, `layout`, `manager`); tensors in `storage`."""
