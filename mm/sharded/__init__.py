"""Weight directories in MindSpeed-MM's layout: one ``mp_rank_TT_PPP`` for every rank, read for any layout."""
