-- ARGV: 3 who lets go, 4 who asks, 5 ttl in ms, 6 server time in ms when the claim must have ended, 7 client, 8 what to
-- keep of the holder, 9 how many tokens the client wants.
local life = life_of(ARGV[5], ARGV[6])
-- Nobody else waits.
if life and redis.call('EXISTS', ORDER) == 0 and owner_of(redis.call('GET', LOCK)) == OWNER then
    redis.call('DEL', LOCK)
    local token, tokens = draw(ARGV[9])
    hold(ARGV[4], token, life, ARGV[7], ARGV[8])
    return { 'released', 'granted', stamp, token, life, tokens }
end
