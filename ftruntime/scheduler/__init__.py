"""What runs next: request rows, prefill queue, running set, interleave policy. No torch."""
