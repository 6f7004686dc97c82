return { let_go(OWNER) and 'released' or 'lost', stamp }
