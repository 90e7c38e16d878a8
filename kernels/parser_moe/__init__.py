"""Forward pass of a PARSER-compressed MoE layer: backbone once per token, ragged residuals per (token, expert)."""
