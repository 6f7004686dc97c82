return { let_go(OWNER) and 'released' or 'lost', text(now_us) }
