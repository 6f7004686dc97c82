local released = let_go(OWNER) and 'released' or 'lost'
if not life then
    return { released, 'late', stamp }
end
local granted, value = take(ARGV[3], life, ARGV[6], ARGV[7])
return { released, unpack(granted or busy(value, life)) }
