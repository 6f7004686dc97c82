-- ARGV: 4 ttl in ms, 5 server time in ms when the claim must have ended, 6 send stamp, 7 client, 8 what to keep of the
-- holder, 9 '0' not to wait, 10 how many tokens the client wants.
local life = life_of(ARGV[4], ARGV[5])
if not life then
    return { 'late', stamp }
end
if redis.call('EXISTS', LOCK, ORDER) == 0 then
    local token, tokens = draw(ARGV[10])
    hold(OWNER, token, life, ARGV[7], ARGV[8])
    return { 'granted', stamp, token, life, tokens }
end
