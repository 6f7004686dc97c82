-- ARGV: 3 ttl in ms, 4 server time in ms when the claim must have ended, 5 send stamp, 6 client, 7 what to keep of the
-- holder, 8 '1' to wait.
local life = life_of(ARGV[3], ARGV[4])
if not life then
    return { 'late', text(now_us) }
end
local granted, value = take(OWNER, life, ARGV[6], ARGV[7])
if granted then
    return granted
end
if ARGV[8] ~= '1' then
    return busy(value, life)
end
enqueue(OWNER, tonumber(ARGV[3]), life, ARGV[5], ARGV[6], ARGV[7])
-- Nobody else looks after the expiry: should the first in line be gone, this is where it is found out.
if has_missed_a_refresh(oldest()) then
    tell_first(redis.call('PTTL', LOCK))
end
return busy(value, life, oldest() == OWNER)
