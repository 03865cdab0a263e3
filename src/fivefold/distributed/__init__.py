"""Who is who among the ranks, what they exchange on the host, and how samples are dealt to them."""
