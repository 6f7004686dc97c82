-- ARGV: 2 who lets go, 3 who asks, 4 ttl in ms, 5 server time in ms when the claim must have ended, 6 client, 7 what to
-- keep of the holder.
local life = life_of(ARGV[4], ARGV[5])
-- Nobody else waits.
if life and redis.call('EXISTS', QUEUE) == 0 and owner_of(redis.call('GET', LOCK)) == OWNER then
    redis.call('DEL', LOCK)
    local token = draw()
    hold(ARGV[3], token, life, ARGV[6], ARGV[7])
    return { 'released', 'granted', stamp, token, life }
end
