-- ARGV: 2 who lets go, 3 who asks, 4 ttl in ms, 5 server time in ms when the claim must have ended, 6 client, 7 what to
-- keep of the holder.
local released = let_go(OWNER) and 'released' or 'lost'
local life = life_of(ARGV[4], ARGV[5])
if not life then
    return { released, 'late', text(now_us) }
end
local granted, value = take(ARGV[3], life, ARGV[6], ARGV[7])
return { released, unpack(granted or busy(value, life)) }
