-- Stands for itself, so that looking changes nothing. KEYS: the lock.
return { redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]) }
