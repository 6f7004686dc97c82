-- ARGV: 3 ttl in ms, 4 server time in ms when the claim must have ended, 5 send stamp, 6 client, 7 what to keep of the
-- holder, 8 '1' to wait.
local life = life_of(ARGV[3], ARGV[4])
if not life then
    return { 'late', stamp }
end
if redis.call('EXISTS', LOCK, QUEUE) == 0 then
    local token = draw()
    hold(OWNER, token, life, ARGV[6], ARGV[7])
    return { 'granted', stamp, token, life }
end
