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
